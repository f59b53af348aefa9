"""A step under a plan with pipeline stages: all micro-batches in one pass through the stages.

Each rank holds the parameters of its own stage, in the engine's store. A parameter that several stages use is on each of them:
their gradients are summed at the end of the pass, in the same order everywhere, and each stage updates its own copy alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from scrimp.chunks import Slot, Store
from scrimp.engine.lowered.fault import operation
from scrimp.engine.lowered.passes import MeteredRanks, MeteredSteps, PlannedPasses, Stepping
from scrimp.engine.lowered.program import Program
from scrimp.engine.lowered.weights import EngineWeights
from scrimp.engine.step.batch import to_device
from scrimp.engine.step.phase import Phase
from scrimp.engine.step.residency import Residents
from scrimp.errors import FitError, RunError
from scrimp.ledger import format_nbytes
from scrimp.lower import Buckets, Generated, Overlap, Pipeline, gathered, local_shape, stage_buckets, summed
from scrimp.move import Peers

if TYPE_CHECKING:
    from torch import nn

    from scrimp.chunks import Wire


class StageWeights(EngineWeights):
    """The weights of a stage, of which other stages hold some too: implements `StageWeights` of `scrimp.lower`."""

    def __init__(
        self,
        program: Program,
        comm: MeteredRanks,
        peers: Peers,
        store: Store,
        residents: Residents,
        model: nn.Module,
        receive: Callable[[int, Slot, torch.Tensor], None],
        at: tuple[int, ...],
    ) -> None:
        self._program, self._peers = program, peers
        super().__init__(program.part, comm, store, residents, model, receive, at)
        self._summed: set[str] = set()  # gradients of this step that need no more summands of other ranks
        # A backward runs from the last layer to the first: this layer brings the last summand of a micro-batch.
        self._last: dict[str, int] = {}
        for piece in program.part.pieces:
            for name, layers in piece.summands.items():
                self._last[name] = min(self._last.get(name, layers[0]), *layers)

    def _buckets(self) -> Buckets:
        assert self._program.staged is not None
        return stage_buckets(self._program.staged, self._program.stage, self._later)

    def _overlap(self, buckets: Buckets) -> Overlap:
        """None: the room that is left between tasks of the stage is not counted."""
        return Overlap()

    def begin(self) -> None:
        super().begin()
        self._summed.clear()

    def enter(self, layer: int, *, backward: bool) -> None:
        phase = Phase.BACKWARD if backward else Phase.FORWARD
        if self.residents.phase is not phase:
            self.residents.enter(phase)
        super().enter(layer, backward=backward)

    def whole(self, name: str) -> torch.Tensor:
        first, each = self._program.holders[name], self._program.rest(name)
        if first == self._program.stage:
            found = super().whole(name).contiguous()
        else:
            found = torch.empty(each.shape, dtype=getattr(torch, each.dtype), device=self._data.device)
        self._peers.spread(found, first)
        return found

    def complete(self, names: Sequence[str]) -> None:
        left = [name for name in names if name not in self._summed]
        super().complete(left)
        self._summed.update(left)

    # Weights on several stages.

    def gradient_tile(self, name: str) -> torch.Tensor:
        each, (layer, slot) = self.rest[name], self.places[name]
        if name not in self._seen:  # this stage only reads the weight
            mesh = self.comm.mesh
            return torch.zeros(local_shape(each.use, mesh), dtype=self._data.dtype_of(layer), device=self._data.device)
        self.complete([name])
        (mine,) = self._data.gradients_of(layer, slot)
        return gathered(self.comm, mine.to(self._data.device), each, each.states)

    def set_gradient(self, name: str, tile: torch.Tensor) -> None:
        each, (layer, slot) = self.rest[name], self.places[name]
        flat = summed(self.comm, tile, each.use, each, each.states, donate=True).view(-1)
        if name in self._seen:
            (mine,) = self._data.gradients_of(layer, slot)
            mine.copy_(flat)
        else:
            self._receive(layer, slot, flat)
        self._summed.add(name)

    def _complete(self, name: str) -> bool:
        return self._layer == self._last[name]


class StagedPasses(PlannedPasses):
    """Runs the pipeline. A step takes the global batch: each stage takes its part of a micro-batch when a piece needs it."""

    def __init__(self, program: Program, weights: StageWeights, peers: Peers, model: nn.Module, wire: Wire) -> None:
        super().__init__(program, weights, model, wire)
        assert program.staged is not None
        self._peers = peers
        self._pipeline = Pipeline(
            program.staged, program.stage, self.comm, weights, peers, MeteredSteps, device=self._residents.store.device
        )  # fmt: skip
        self._written = program.staged.written()
        self.retries, self.trains = False, bool(program.part.partials)
        self.by_hand = (
            f"under a plan with {program.staged.stages} pipeline stages is not possible: all micro-batches pass through the "
            f"stages together; use engine.step(*batch), which also updates, with the global batch of {program.micro_batches} "
            "micro-batches"
        )

    def parts(
        self, engine: Stepping, args: tuple[Any, ...], kwargs: dict[str, Any], count: int
    ) -> list[Callable[[], torch.Tensor]]:
        """One pass, which returns the mean loss of the global batch."""
        given = self.tensors(args, kwargs)
        for name, tensor in given.items():
            if tuple(tensor.shape) != self.batch[name].of:
                raise RunError(
                    f"'{name}' of the batch has the shape {tuple(tensor.shape)}: under this plan it is {self.batch[name].of}, "
                    "the global batch, the same on every rank of every stage"
                )
        _, here = to_device((), given, engine.device, engine.input_dtype)
        return [partial(self._pass, engine, here)]

    @property
    def runners(self) -> list[Generated]:
        return [runner for runner in self._pipeline.runners.values() if isinstance(runner, Generated)]

    def where(self, error: BaseException) -> str | None:
        found = (runner.where(error) for runner in self.runners)
        where = operation(error, self._paths) or next((each for each in found if each is not None), None)
        return f"pipeline stage {self.program.stage}, {where or self._residents.place()}"

    def _pass(self, engine: Stepping, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        engine.current.part_arrived = set()
        engine.current.last_part = False  # no update starts before weights on several stages have their sums
        self._pipeline.seed = hash((self._seed, engine.steps))
        self.weights.begin()
        try:
            loss = self._pipeline.step(batch, scale=engine.loss_scale.value)
        except FitError as error:
            peak = format_nbytes(self.program.peak_nbytes)
            words = f"{error}. This is pipeline stage {self.program.stage}, for which the plan predicts a peak of {peak}"
            raise FitError(words, tier=error.tier) from error
        for name, stage in self._written:  # every rank has all buffers, as after a step without stages
            self._peers.spread(self.weights.buffer(name), stage)
        return loss
