"""How each operator may be split over a mesh, and the proof."""
