"""Cuts the traced graph into layers."""
