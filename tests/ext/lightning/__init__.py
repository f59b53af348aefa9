"""Tests of the door to Lightning."""
