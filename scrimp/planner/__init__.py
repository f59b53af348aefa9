"""The sharding of every operator that needs the least memory, then the least time."""

from scrimp.planner._backend import solver_name
from scrimp.planner._evaluate import Evaluation, evaluate, held_nbytes
from scrimp.planner._found import Phase
from scrimp.planner._frontier import frontier
from scrimp.planner._problem import Edge, Hold, Node, PairHold, Problem
from scrimp.planner._solve import Solution, solve

__all__ = [
    "Edge", "Evaluation", "Hold", "Node", "PairHold", "Phase", "Problem", "Solution", "evaluate", "frontier", "held_nbytes",
    "solve", "solver_name",
]  # fmt: skip
