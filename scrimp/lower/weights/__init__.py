"""A model's weights and gradients on a rank: where they rest, and how they are gathered and summed, several in one move."""
