"""Where every parameter's elements lie, how optimizer states are coded, and the optimizers as data."""
