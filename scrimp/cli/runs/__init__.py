"""`scrimp report` and `scrimp compare`."""
