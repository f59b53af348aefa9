"""Layout -> layout: synthesise a program of collectives, check it, simulate it, run it."""

from scrimp.move._program import Program, Step
from scrimp.move._synthesize import lower_bound_numel, synthesize

__all__ = ["Program", "Step", "lower_bound_numel", "synthesize"]
