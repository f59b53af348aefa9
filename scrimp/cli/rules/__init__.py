"""`scrimp rules`."""
