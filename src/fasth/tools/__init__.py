"""What the command ``fasth`` runs, and what measures and verifies the library."""
