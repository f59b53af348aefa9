"""Graphs in the user's cache, each under a key of everything that decides what `capture` makes of a model."""
