"""At which rates do SVD networks train? Chosen on some tasks, judged once on others."""
