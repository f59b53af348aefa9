"""Meters of device memory: an operator hook on the CPU, the allocator's counters on CUDA."""
