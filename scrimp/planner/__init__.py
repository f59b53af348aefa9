"""The sharding of every operator that needs the least memory, then the least time."""
