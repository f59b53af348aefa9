"""Moves: redistribution of a sharded array by a synthesised program of collectives with a bounded peak.

In:   two layouts of one array on one mesh.
Out:  a `Program`: collectives that never hold more than the larger of both ends, checked before it runs.

    [x,-] ──all_to_all──> [-,x] ──all_gather──> [-,-]        peak <= max(source, target)

Read in this order:

    program.py    `Program`: steps with their cost, `run`, `to_json`
    plan/         atoms and the search space, the search in normal form, exact prices, `synthesize`
    checker.py    the proof: every step obeys its typing rule and the chain ends in the target
    simulator.py  all ranks in one process: the oracle of the executor
    run/          the executor on torch.distributed: ranks compare programs first; many arrays in few calls;
                  one rank without the others, for a rehearsal; messages between the stages of a pipeline, by tags
                  (peers.py) or, on NCCL, by groups (channels.py)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from scrimp._lazy import lazily

if TYPE_CHECKING:
    from scrimp.move.plan.cost import MoveCost, MoveCosts
    from scrimp.move.plan.dtypes import ITEMSIZE
    from scrimp.move.plan.routes import sizes_by_rank
    from scrimp.move.plan.steps import seconds_on
    from scrimp.move.plan.synthesize import clear_program_cache, lower_bound_numel, synthesize
    from scrimp.move.plan.tiles import tiles
    from scrimp.move.program import Program, Step
    from scrimp.move.run.channels import Channel, ChannelPeers
    from scrimp.move.run.comm import end_group, mesh_rank
    from scrimp.move.run.execute import stage_nbytes
    from scrimp.move.run.lone import LoneComm
    from scrimp.move.run.many import redistribute_many
    from scrimp.move.run.peers import Peers
    from scrimp.move.run.received import received_nbytes
    from scrimp.move.run.run import Started, run_between, run_program, start_program
    from scrimp.move.run.torch_private import all_gather_flat, default_store, group_timeout, own_group

__all__ = [
    "ITEMSIZE", "Channel", "ChannelPeers", "LoneComm", "MoveCost", "MoveCosts", "Peers", "Program", "Started", "Step",
    "all_gather_flat", "clear_program_cache", "default_store", "end_group", "group_timeout", "lower_bound_numel", "mesh_rank",
    "own_group", "received_nbytes", "redistribute_many", "run_between", "run_program", "seconds_on", "sizes_by_rank",
    "stage_nbytes", "start_program", "synthesize", "tiles",
]  # fmt: skip

__getattr__ = lazily(
    __name__,
    {
        "MoveCost": "scrimp.move.plan.cost",
        "MoveCosts": "scrimp.move.plan.cost",
        "ITEMSIZE": "scrimp.move.plan.dtypes",
        "sizes_by_rank": "scrimp.move.plan.routes",
        "seconds_on": "scrimp.move.plan.steps",
        "clear_program_cache": "scrimp.move.plan.synthesize",
        "lower_bound_numel": "scrimp.move.plan.synthesize",
        "synthesize": "scrimp.move.plan.synthesize",
        "tiles": "scrimp.move.plan.tiles",
        "Program": "scrimp.move.program",
        "Step": "scrimp.move.program",
        "Channel": "scrimp.move.run.channels",
        "ChannelPeers": "scrimp.move.run.channels",
        "end_group": "scrimp.move.run.comm",
        "mesh_rank": "scrimp.move.run.comm",
        "stage_nbytes": "scrimp.move.run.execute",
        "LoneComm": "scrimp.move.run.lone",
        "all_gather_flat": "scrimp.move.run.torch_private",
        "redistribute_many": "scrimp.move.run.many",
        "Peers": "scrimp.move.run.peers",
        "received_nbytes": "scrimp.move.run.received",
        "Started": "scrimp.move.run.run",
        "run_between": "scrimp.move.run.run",
        "run_program": "scrimp.move.run.run",
        "start_program": "scrimp.move.run.run",
        "default_store": "scrimp.move.run.torch_private",
        "group_timeout": "scrimp.move.run.torch_private",
        "own_group": "scrimp.move.run.torch_private",
    },
)
