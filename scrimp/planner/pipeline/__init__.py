"""Pipeline stages and micro-batches: schedules, cuts, and the problem of each stage."""
