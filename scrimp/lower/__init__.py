"""Lowering: a plan and a captured model become the steps of one rank, forward and backward.

In:   a `Plan`, and the `Graph` of the same model.
Out:  a `Lowered`: for each class of layers the steps of its forward and of its backward, as data without torch.

    plan + graph ──choice──> split of every operator ──layer──> steps ──> run on a rank

Read in this order:

    steps.py      what a step is
    verify.py     whether the plan is of this model
    choice.py     the plan's choices for a captured layer
    layer.py      the steps of one layer
    model.py      `lower`: all layers; what leaves one is what the next one gets
    checker.py    the proof of a lowered model, apart from what builds it
    moves.py      communication: moves between placements
    footprint.py  the bytes that each step holds, and the room that is left below the peak
    weights/      rest.py: the shards of weights between steps; tiles.py: gathers and sums; buckets.py, joined.py: several of
                  them in one move; in_flight.py: buckets for a stage of a pipeline; overlap.py: which of them run beside
                  operators; together.py: runs them; shards.py: the model's data on a rank
    run.py        a training step: forward and backward through all layers
    source.py     the steps of a layer as generated Python, which runs them
    interpret.py  runs them one by one: the oracle of the generated source
    layer_module.py  a lowered layer as an `nn.Module`, for a training loop of one's own
    stages.py     `lower_stages`: the pieces of a pipeline, what crosses their borders, and the order of a stage's turns
    channels.py   the process groups of a pipeline over a backend without tags
    pipeline.py   a training step of a rank of a pipeline, over all micro-batches
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from scrimp._lazy import lazily

if TYPE_CHECKING:
    from scrimp.lower.channels import channels_of
    from scrimp.lower.checker import check, digest
    from scrimp.lower.interpret import Interpreter
    from scrimp.lower.layer_module import LayerModule, module
    from scrimp.lower.model import Lowered, LoweredLayer, later_axes, lower
    from scrimp.lower.moves import Arrived, Communicator, Handle, Ranks, local_shape, made_whole, redistribute
    from scrimp.lower.pipeline import Pipeline
    from scrimp.lower.run import Runner, Slots
    from scrimp.lower.source import Generated
    from scrimp.lower.stages import Staged, crossing, lower_stages, messages
    from scrimp.lower.steps import (
        Accumulate,
        Ahead,
        Behind,
        Call,
        Fetch,
        Free,
        Gather,
        Move,
        Offload,
        Reduce,
        Store,
        described,
    )
    from scrimp.lower.weights.buckets import Buckets, buckets_of, chunks
    from scrimp.lower.weights.in_flight import stage_buckets
    from scrimp.lower.weights.joined import shared_together, summed_together
    from scrimp.lower.weights.overlap import Overlap, overlap_of
    from scrimp.lower.weights.rest import Rest
    from scrimp.lower.weights.shards import Shards
    from scrimp.lower.weights.tiles import cut, flat_tile, gathered, part_of, shared, summed
    from scrimp.lower.weights.together import Summed, Together

__all__ = [
    "Accumulate",
    "Ahead",
    "Arrived",
    "Behind",
    "Buckets",
    "Call",
    "Communicator",
    "Fetch",
    "Free",
    "Gather",
    "Generated",
    "Handle",
    "Interpreter",
    "LayerModule",
    "Lowered",
    "LoweredLayer",
    "Move",
    "Offload",
    "Overlap",
    "Pipeline",
    "Ranks",
    "Reduce",
    "Rest",
    "Runner",
    "Shards",
    "Slots",
    "Staged",
    "Store",
    "Summed",
    "Together",
    "buckets_of",
    "channels_of",
    "check",
    "chunks",
    "crossing",
    "cut",
    "described",
    "digest",
    "flat_tile",
    "gathered",
    "later_axes",
    "local_shape",
    "lower",
    "lower_stages",
    "made_whole",
    "messages",
    "module",
    "overlap_of",
    "part_of",
    "redistribute",
    "shared",
    "shared_together",
    "stage_buckets",
    "summed",
    "summed_together",
]  # fmt: skip

__getattr__ = lazily(
    __name__,
    {
        "channels_of": "scrimp.lower.channels",
        "check": "scrimp.lower.checker",
        "digest": "scrimp.lower.checker",
        "Arrived": "scrimp.lower.moves",
        "Communicator": "scrimp.lower.moves",
        "Handle": "scrimp.lower.moves",
        "Ranks": "scrimp.lower.moves",
        "Interpreter": "scrimp.lower.interpret",
        "Lowered": "scrimp.lower.model",
        "LoweredLayer": "scrimp.lower.model",
        "later_axes": "scrimp.lower.model",
        "lower": "scrimp.lower.model",
        "LayerModule": "scrimp.lower.layer_module",
        "module": "scrimp.lower.layer_module",
        "Pipeline": "scrimp.lower.pipeline",
        "Runner": "scrimp.lower.run",
        "Slots": "scrimp.lower.run",
        "Ahead": "scrimp.lower.steps",
        "Behind": "scrimp.lower.steps",
        "Accumulate": "scrimp.lower.steps",
        "Free": "scrimp.lower.steps",
        "Gather": "scrimp.lower.steps",
        "Move": "scrimp.lower.steps",
        "Reduce": "scrimp.lower.steps",
        "Store": "scrimp.lower.steps",
        "Call": "scrimp.lower.steps",
        "Fetch": "scrimp.lower.steps",
        "Offload": "scrimp.lower.steps",
        "described": "scrimp.lower.steps",
        "Generated": "scrimp.lower.source",
        "Staged": "scrimp.lower.stages",
        "crossing": "scrimp.lower.stages",
        "messages": "scrimp.lower.stages",
        "lower_stages": "scrimp.lower.stages",
        "Shards": "scrimp.lower.weights.shards",
        "Rest": "scrimp.lower.weights.rest",
        "Buckets": "scrimp.lower.weights.buckets",
        "buckets_of": "scrimp.lower.weights.buckets",
        "chunks": "scrimp.lower.weights.buckets",
        "stage_buckets": "scrimp.lower.weights.in_flight",
        "Overlap": "scrimp.lower.weights.overlap",
        "overlap_of": "scrimp.lower.weights.overlap",
        "Summed": "scrimp.lower.weights.together",
        "Together": "scrimp.lower.weights.together",
        "shared_together": "scrimp.lower.weights.joined",
        "summed_together": "scrimp.lower.weights.joined",
        "cut": "scrimp.lower.weights.tiles",
        "flat_tile": "scrimp.lower.weights.tiles",
        "gathered": "scrimp.lower.weights.tiles",
        "part_of": "scrimp.lower.weights.tiles",
        "local_shape": "scrimp.lower.moves",
        "made_whole": "scrimp.lower.moves",
        "redistribute": "scrimp.lower.moves",
        "shared": "scrimp.lower.weights.tiles",
        "summed": "scrimp.lower.weights.tiles",
    },
)
