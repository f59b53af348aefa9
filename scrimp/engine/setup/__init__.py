"""Before the first step: arguments, budget, ranks, first placement, and the engine adopting the model's parameters."""
