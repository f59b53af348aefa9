"""`scrimp rules`: lists, checks and discovers sharding rules."""
