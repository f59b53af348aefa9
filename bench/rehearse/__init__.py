"""Rehearsals of large plans."""
