"""Runs programs on torch.distributed."""
