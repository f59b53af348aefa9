"""`scrimp train` and `scrimp top`."""
