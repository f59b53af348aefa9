"""Training data: files become samples, and an order that depends on the seed alone says which sample comes when."""
