"""The search on problems too large for the linear program; no torch."""
