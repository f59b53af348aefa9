"""Sharding rules as data, and the layouts that follow from them."""
