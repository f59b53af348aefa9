"""Where model data lives: the chunk table, the tiers, residency, and the optimizer's sweep over chunks."""
