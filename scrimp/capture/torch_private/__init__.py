"""Private names of torch that capture needs."""
