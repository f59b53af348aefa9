"""`scrimp checkpoint`: compare checksums, show, write for other ranks, export. `app.py` has the options, `work.py` the work."""
