"""`scrimp demo`."""
