"""The command ``fasth`` and the tools behind it: tuning, checks, timing, and the table of test problems."""
