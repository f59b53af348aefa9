"""The fused optimizer update: C on the host, Triton on the device."""
