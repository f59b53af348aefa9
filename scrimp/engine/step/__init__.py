"""One forward and backward: fetch, run, recompute, evict; a failed attempt is undone."""
