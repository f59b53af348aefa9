"""Stages and micro-batches."""
