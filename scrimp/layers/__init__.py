"""Module tree -> layers: the unit that is fetched, run, recomputed, updated and released."""

from scrimp.layers._find import Layer, find_layers

__all__ = ["Layer", "find_layers"]
