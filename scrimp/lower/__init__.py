"""Lowering: a plan and a captured model become the steps of one rank, forward and backward.

In:   a `Plan`, and the `Graph` of the same model.
Out:  a `Lowered`: for each class of layers the steps of its forward and of its backward, as data without torch.

    plan + graph ──choice──> split of every operator ──layer──> steps ──> run on a rank

Read in this order:

    steps.py      what a step is
    choice.py     the plan's choices for a captured layer
    layer.py      the steps of one layer
    rest.py       weights between steps: their shards, and the placement in use
    model.py      `lower`: all layers; what leaves one is what the next one gets
    comm.py, moves.py    communication: moves between placements
    shards.py     the model's data on a rank
    interpret.py  runs the steps one by one
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from scrimp._lazy import lazily

if TYPE_CHECKING:
    from scrimp.lower.comm import Communicator, Ranks
    from scrimp.lower.interpret import Interpreter
    from scrimp.lower.model import Lowered, lower
    from scrimp.lower.shards import Shards, cut

__all__ = ["Communicator", "Interpreter", "Lowered", "Ranks", "Shards", "cut", "lower"]

__getattr__ = lazily(
    __name__,
    {
        "Communicator": "scrimp.lower.comm",
        "Ranks": "scrimp.lower.comm",
        "Interpreter": "scrimp.lower.interpret",
        "Lowered": "scrimp.lower.model",
        "lower": "scrimp.lower.model",
        "Shards": "scrimp.lower.shards",
        "cut": "scrimp.lower.shards",
    },
)
