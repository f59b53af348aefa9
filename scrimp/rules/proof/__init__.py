"""Numeric proofs of sharding rules."""
