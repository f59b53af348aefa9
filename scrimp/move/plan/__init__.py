"""Synthesis of a program of collectives, without torch."""
