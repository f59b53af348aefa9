"""A rule as data, and what follows from it."""
