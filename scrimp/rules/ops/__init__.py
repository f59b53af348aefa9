"""The sharding rules, one file per family of operators."""
