"""The best plan on one mesh, and a lower bound for it."""
