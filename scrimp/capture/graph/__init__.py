"""The captured graph, as frozen dataclasses."""
