"""The plan, and what it answers."""
