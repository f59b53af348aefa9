"""Layout -> layout: synthesise a program of collectives, check it, simulate it, run it."""

from scrimp.move._cost import MoveCost, MoveCosts
from scrimp.move._program import Program, Step
from scrimp.move._synthesize import lower_bound_numel, synthesize

__all__ = ["MoveCost", "MoveCosts", "Program", "Step", "lower_bound_numel", "synthesize"]
