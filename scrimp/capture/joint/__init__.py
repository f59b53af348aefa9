"""A layer's forward and backward as one graph."""
