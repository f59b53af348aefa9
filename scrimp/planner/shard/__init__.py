"""The sharding options of operator groups on a mesh."""
