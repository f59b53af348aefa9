"""The baselines (DDP, ZeRO, Megatron-LM) as plans of the same memory model."""
