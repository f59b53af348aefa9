"""How gradients travel between ranks: all of them, or few entries at a time with the rest kept back."""
