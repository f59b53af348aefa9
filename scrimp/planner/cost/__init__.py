"""Seconds and bytes of moves, of states at rest and of saved activations."""
