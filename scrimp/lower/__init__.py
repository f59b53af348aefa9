"""Lowering: a plan and a captured model become the steps of one rank, forward and backward.

In:   a `Plan`, and the `Graph` of the same model.
Out:  a `Lowered`: for each class of layers the steps of its forward and of its backward, as data without torch.

    plan + graph ──choice──> split of every operator ──layer──> steps ──> run on a rank

Read in this order:

    steps.py      what a step is
    verify.py     whether the plan is of this model
    choice.py     the plan's choices for a captured layer
    layer.py      the steps of one layer
    rest.py       weights between steps: their shards, and the placement in use
    model.py      `lower`: all layers; what leaves one is what the next one gets
    check.py      the proof of a lowered model, apart from what builds it
    comm.py, moves.py    communication: moves between placements
    shards.py     the model's data on a rank
    run.py        a training step: forward and backward through all layers
    source.py     the steps of a layer as generated Python, which runs them
    interpret.py  runs them one by one: the oracle of the generated source
    stages.py     `lower_stages`: the pieces of a pipeline, what crosses their borders, and the order of a stage's turns
    pipeline.py   a training step of a rank of a pipeline, over all micro-batches
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from scrimp._lazy import lazily

if TYPE_CHECKING:
    from scrimp.lower.check import check, digest
    from scrimp.lower.comm import Communicator, Ranks
    from scrimp.lower.interpret import Interpreter
    from scrimp.lower.model import Lowered, lower
    from scrimp.lower.pipeline import Pipeline
    from scrimp.lower.run import Runner
    from scrimp.lower.shards import Shards, cut
    from scrimp.lower.source import Generated
    from scrimp.lower.stages import Staged, lower_stages

__all__ = [
    "Communicator", "Generated", "Interpreter", "Lowered", "Pipeline", "Ranks", "Runner", "Shards", "Staged", "check",
    "cut", "digest", "lower", "lower_stages",
]  # fmt: skip

__getattr__ = lazily(
    __name__,
    {
        "check": "scrimp.lower.check",
        "digest": "scrimp.lower.check",
        "Communicator": "scrimp.lower.comm",
        "Ranks": "scrimp.lower.comm",
        "Interpreter": "scrimp.lower.interpret",
        "Lowered": "scrimp.lower.model",
        "lower": "scrimp.lower.model",
        "Pipeline": "scrimp.lower.pipeline",
        "Runner": "scrimp.lower.run",
        "Generated": "scrimp.lower.source",
        "Staged": "scrimp.lower.stages",
        "lower_stages": "scrimp.lower.stages",
        "Shards": "scrimp.lower.shards",
        "cut": "scrimp.lower.shards",
    },
)
