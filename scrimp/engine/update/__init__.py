"""The global gradient check, then the optimizer's update on device, host or disk."""
