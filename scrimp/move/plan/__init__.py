"""Synthesis of a program of collectives; no torch."""
