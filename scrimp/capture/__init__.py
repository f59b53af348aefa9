"""A model and an example batch -> what training it computes, in layers."""
