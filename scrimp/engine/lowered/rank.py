"""How a rank runs a plan: its program, the ranks of its stage, and messages to the other stages."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from scrimp.chunks import Optimizer, Slot, Store, Wire
from scrimp.engine.lowered.passes import MeteredRanks, PlannedPasses
from scrimp.engine.lowered.program import Program, program_of, stages_of
from scrimp.engine.lowered.sparse_axis import exchanging_ranks
from scrimp.engine.lowered.sparse_weights import SparseWeights
from scrimp.engine.lowered.stages import StagedPasses, StageWeights
from scrimp.engine.lowered.tiling import PlannedTiling
from scrimp.engine.lowered.weights import EngineWeights
from scrimp.engine.setup.process_groups import leave, own_stage
from scrimp.engine.step.residency import Residents
from scrimp.errors import RunError
from scrimp.exchange import Dense, Sparse
from scrimp.lower import channels_of
from scrimp.move import ChannelPeers, Peers
from scrimp.planner import Plan


@dataclass(frozen=True, kw_only=True)
class PlannedRank:
    """`all_ranks`: of all stages. `stage`: the ranks of this one's stage; without stages the same. `peers`: None without
    stages. `axis`, `across`: of a sparse exchange, the mesh axis and the ranks along it."""

    program: Program
    all_ranks: Wire
    stage: Wire
    comm: MeteredRanks
    peers: Peers | None
    axis: str | None
    across: Wire

    @property
    def tiling(self) -> PlannedTiling:
        return PlannedTiling(self.program, self.comm, self.peers)

    def passes(
        self,
        store: Store,
        residents: Residents,
        model: nn.Module,
        receive: Callable[[int, Slot, torch.Tensor], None],
        at: tuple[int, ...],
    ) -> PlannedPasses:
        """`at`: the place of each layer in the store's table."""
        self.comm.meter = residents.meter
        if self.peers is None:
            of = EngineWeights if self.axis is None else partial(SparseWeights, axis=self.axis)
            whole = of(self.program.part, self.comm, store, residents, model, receive, at)
            return PlannedPasses(self.program, whole, model, self.all_ranks)
        weights = StageWeights(self.program, self.comm, self.peers, store, residents, model, receive, at)
        passes = StagedPasses(self.program, weights, self.peers, model, self.all_ranks)
        weakref.finalize(passes, leave, self.stage)
        weakref.finalize(passes, self.peers.close)
        return passes


def planned_rank(
    plan: Plan,
    model: nn.Module,
    wire: Wire,
    optimizer: Optimizer,
    precision: str,
    device: torch.device,
    exchange: Dense | Sparse | None,
) -> PlannedRank:
    """Raises `RunError` if the plan cannot run here."""
    stages = stages_of(plan)
    if stages > 1 and isinstance(exchange, Sparse):
        raise RunError(f"exchange=Sparse(...) with {stages} pipeline stages is not possible: plan without stages, or use Dense()")
    program = program_of(plan, model, wire, optimizer, precision, device)
    axis, across = exchanging_ranks(program.part.pieces[0], exchange, wire)
    stage = own_stage(wire, stages)
    comm = MeteredRanks(plan.mesh, program.rank, stage.group)
    return PlannedRank(
        program=program, all_ranks=wire, stage=stage, comm=comm, peers=peers_of(program, wire), axis=axis, across=across
    )  # fmt: skip


def peers_of(program: Program, wire: Wire) -> Peers | None:
    """By tags over gloo; over NCCL, which has none, by channels."""
    if program.staged is None:
        return None
    if wire.device.type == "cpu":
        return Peers(program.plan.mesh.size)
    return ChannelPeers(program.plan.mesh.size, channels_of(program.staged), wire.device)
