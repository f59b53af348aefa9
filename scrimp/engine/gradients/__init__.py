"""How gradients travel between ranks: dense, or sparse with error feedback."""
