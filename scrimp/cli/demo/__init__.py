"""`scrimp demo`: training within a memory budget, and moves between layouts."""
