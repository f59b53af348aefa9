"""Cutting the traced graph into layers."""
