"""One placement per layer, and the store over all of them."""
