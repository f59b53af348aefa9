"""Known parallelisms as plans of the same memory model."""
