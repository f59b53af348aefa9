"""The integer program of a model: nodes, edges and holds, from its layers."""
