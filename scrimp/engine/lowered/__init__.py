"""Runs a plan in the engine: the lowered program in place of the model, and the model's data as the plan shards it."""
