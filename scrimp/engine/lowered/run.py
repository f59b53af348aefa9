"""A step's forward and backward under a plan: the lowered program in place of the model and autograd."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from scrimp.capture import batch_tensors
from scrimp.chunks import Meter, Slot, Store, Wire
from scrimp.engine.lowered.batch import BatchPart, micro_batches, parts_of
from scrimp.engine.lowered.program import Program
from scrimp.engine.lowered.weights import EngineWeights
from scrimp.engine.step.batch import to_device
from scrimp.engine.step.phase import Phase
from scrimp.engine.step.residency import Residents
from scrimp.lower import Generated, Ranks
from scrimp.move import Program as MoveProgram

if TYPE_CHECKING:
    from scrimp.engine._training import Training


class MeteredRanks(Ranks):
    """Tells the meter that a moved copy is one, and that what a move takes besides is scratch."""

    meter: Meter | None = None

    def move(self, program: MoveProgram, local: torch.Tensor, *, donate: bool) -> torch.Tensor:
        if self.meter is None:
            return super().move(program, local, donate=donate)
        with self.meter.counting("scratch"):
            moved = super().move(program, local, donate=donate)
        self.meter.mark(moved, "moved")
        return moved


def taking(engine: weakref.ref[Training]) -> Callable[[int, Slot, torch.Tensor], None]:
    """Gives gradients to the engine, by a weak reference, so that it can be garbage-collected."""

    def take(layer: int, slot: Slot, gradient: torch.Tensor) -> None:
        alive = engine()
        if alive is not None:
            alive.take(layer, slot, gradient)

    return take


class PlannedRun:
    """`parts`: of the batch, by name. `weights`: also tells the exchange what is left to be summed."""

    def __init__(
        self,
        program: Program,
        comm: MeteredRanks,
        store: Store,
        residents: Residents,
        model: nn.Module,
        wire: Wire,
        receive: Callable[[int, Slot, torch.Tensor], None],
    ) -> None:
        self.program, self.comm, self._model = program, comm, model
        self.parts: dict[str, BatchPart] = parts_of(program, comm.rank)
        self.weights = EngineWeights(program.lowered, comm, store, residents, model, receive)
        self._runner = Generated(program.lowered, comm, self.weights)
        self._residents, self._device = residents, store.device
        self._seed = int(wire.from_first(torch.tensor([torch.initial_seed() & (1 << 62) - 1])))  # rank 0's

    def micro_batches(self, args: tuple[Any, ...], kwargs: dict[str, Any], count: int) -> list[dict[str, torch.Tensor]]:
        given = batch_tensors(self._model, args, kwargs)
        return micro_batches(self.program, self.parts, given, self.comm.rank, count)

    def run(
        self, part: dict[str, torch.Tensor], number: tuple[int, int], *, scale: float, dtype: torch.dtype | None
    ) -> torch.Tensor:
        """Forward and backward of this rank's part of a micro-batch; `number`: of the step, and of the micro-batch in it. Random
        numbers depend on both and on the seed. Returns the loss of all ranks' parts."""
        meter = self._residents.meter
        for tensor in part.values():
            meter.lend(tensor)
        try:
            return self._run(part, number, scale, dtype)
        finally:
            for tensor in part.values():
                meter.forget(tensor)

    def _run(
        self, part: dict[str, torch.Tensor], number: tuple[int, int], scale: float, dtype: torch.dtype | None
    ) -> torch.Tensor:
        _, here = to_device((), part, self._device, dtype)
        self._runner.seed = hash((self._seed, *number))
        self.weights.begin()
        with torch.no_grad():
            saved, loss = self._runner.forward(here)
            value = loss.detach().clone()
            self._residents.enter(Phase.BACKWARD)
            try:
                self._runner.backward(saved, torch.full_like(loss, scale))
            finally:
                self._residents.enter(Phase.FORWARD)
        return value
