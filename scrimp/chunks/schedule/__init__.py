"""Schedules of prefetch and eviction, the tier of each layer, and their predicted cost."""
