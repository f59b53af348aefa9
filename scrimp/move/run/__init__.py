"""Running programs on torch.distributed."""
