"""Weights whose format or whose names are another library's: DCP folders, names that transformers converts."""
