"""Traces a model's forward on fake tensors."""
