"""A step's forward and backward under a plan: the lowered program in place of the model and autograd."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from scrimp.capture import batch_tensors
from scrimp.chunks import Meter, Slot, Wire
from scrimp.engine.lowered.batch import BatchPart, micro_batches, parts_of
from scrimp.engine.lowered.fault import operation
from scrimp.engine.lowered.program import Program
from scrimp.engine.lowered.weights import EngineWeights
from scrimp.engine.lowered.whole_weights import WholeWeights
from scrimp.engine.step.batch import to_device
from scrimp.engine.step.context import StepContext
from scrimp.engine.step.phase import Phase
from scrimp.engine.update.grad_check import LossScale
from scrimp.errors import FitError, RunError
from scrimp.lower import Ahead, Behind, Generated, Handle, LoweredLayer, Ranks, Slots
from scrimp.move import Program as MoveProgram

if TYPE_CHECKING:
    from scrimp.engine._training import Training


class Stepping(Protocol):
    """What a pass needs to know of the step that it belongs to. `pending`: micro-batches of this step that ran before."""

    device: torch.device
    current: StepContext
    loss_scale: LossScale
    micro_batches: int
    steps: int

    @property
    def pending(self) -> int: ...

    @property
    def input_dtype(self) -> torch.dtype | None: ...


class MeteredSteps(Generated):
    """Tells the meter that what a forward saves for the backward is an activation."""

    weights: EngineWeights

    def phase(self, layer: LoweredLayer, program: Ahead | Behind, slots: Slots) -> None:
        super().phase(layer, program, slots)
        if isinstance(program, Ahead):
            meter = self.weights.residents.meter
            for slot in program.saved:
                meter.mark(slots[slot], "activations")


class MeteredRanks(Ranks):
    """Tells the meter that a moved copy is one, and that what a move takes besides is scratch."""

    meter: Meter | None = None

    def move(self, program: MoveProgram, local: torch.Tensor, *, donate: bool) -> torch.Tensor:
        run = partial(super().move, program, local, donate=donate)
        if self.meter is None:
            return run()
        owns = local.untyped_storage().nbytes() == local.nbytes  # else it cannot be donated
        return self.meter.as_one((program.hash, donate, owns, local.stride()), local, run, "moved", "scratch")

    def under_way(self, program: MoveProgram, local: torch.Tensor, *, donate: bool) -> Handle:
        if self.meter is None:
            return super().under_way(program, local, donate=donate)
        with self.meter.counting("scratch"):
            return MeteredHandle(super().under_way(program, local, donate=donate), self.meter)


class MeteredHandle:
    """Of a move that runs beside others: the meter counts its storages one by one."""

    def __init__(self, handle: Handle, meter: Meter) -> None:
        self._handle, self._meter = handle, meter

    def wait(self) -> torch.Tensor:
        with self._meter.counting("scratch"):
            made = self._handle.wait()
        self._meter.mark(made, "moved")
        return made


def taking(engine: weakref.ref[Training]) -> Callable[[int, Slot, torch.Tensor], None]:
    """Gives gradients to the engine, by a weak reference, so that it can be garbage-collected."""

    def take(layer: int, slot: Slot, gradient: torch.Tensor) -> None:
        alive = engine()
        if alive is not None:
            alive.take(layer, slot, gradient)

    return take


class PlannedPasses:
    """`batch`: this rank's part of each tensor. `weights`: also tells the exchange what is left to be summed. `retries`: whether
    a pass that did not fit may be tried again. `trains`: whether this rank has gradients. `by_hand`: why micro-batches cannot be
    run one by one; empty if they can."""

    retries, trains, by_hand = True, True, ""

    def __init__(self, program: Program, weights: EngineWeights, model: nn.Module, wire: Wire) -> None:
        self.program, self.weights, self._model = program, weights, model
        self.comm, self._residents = weights.comm, weights.residents
        self.batch: dict[str, BatchPart] = parts_of(program, self.comm.rank)
        self.device_mesh: Any = None  # of `engine.dtensors`
        self._paths = tuple(layer.path for layer in self._residents.store.table.layers)
        self._seed = int(wire.from_first(torch.tensor([torch.initial_seed() & (1 << 62) - 1])))  # rank 0's

    @property
    def runners(self) -> list[Generated]:
        """What runs the steps of each piece."""
        return [self._runner]

    @cached_property
    def _runner(self) -> Generated:
        (whole,) = self.program.part.pieces
        return MeteredSteps(whole, self.comm, self.weights, device=self._residents.store.device)

    def tensors(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, torch.Tensor]:
        """The tensors of a batch by their names in the plan."""
        if args and callable(args[0]):
            raise RunError(
                "a function was given to run in place of the model, and the engine runs the plan's program: give the batch"
            )
        given = batch_tensors(self._model, args, kwargs)
        if given.keys() != self.batch.keys():
            raise RunError(f"the plan's batch has {', '.join(self.batch)}, this one {', '.join(given)}")
        return given

    def parts(
        self, engine: Stepping, args: tuple[Any, ...], kwargs: dict[str, Any], count: int
    ) -> list[Callable[[], torch.Tensor]]:
        """The forward and backward of each micro-batch, which returns the loss of all ranks' parts of it."""
        found = micro_batches(self.program, self.batch, self.tensors(args, kwargs), self.comm.rank, count)
        return [partial(self._run, engine, part, engine.pending + k) for k, part in enumerate(found)]

    def lent(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Nothing: a micro-batch counts this rank's part of it."""
        return (), {}

    def where(self, error: BaseException) -> str | None:
        """The layer and the operation in which a step failed."""
        return operation(error, self._paths) or self._runner.where(error)

    @contextmanager
    def evaluating(self, engine: Training) -> Iterator[Callable[[Any], Any]]:
        """For a forward of the model. Gives a function that clones weights which leave the engine."""
        with WholeWeights(self.weights, engine.store, engine.weights) as mode:
            yield mode.kept

    def _run(self, engine: Stepping, part: dict[str, torch.Tensor], number: int) -> torch.Tensor:
        engine.current.part_arrived = set()
        meter = self._residents.meter
        _, here = to_device((), part, engine.device, engine.input_dtype)
        for tensor in here.values():
            meter.lend(tensor)
        try:
            return self._metered(engine, here, number)
        except FitError:  # it is tried again, on all ranks, with the memory of moves that are still on their way
            self.weights.settle()
            raise
        finally:
            for tensor in here.values():
                meter.forget(tensor)

    def _metered(self, engine: Stepping, here: dict[str, torch.Tensor], number: int) -> torch.Tensor:
        """Random numbers depend on the seed, the step and the number of the micro-batch in it."""
        self._runner.seed = hash((self._seed, engine.steps, number))
        self.weights.begin()
        with torch.no_grad():
            saved, left = self._runner.forward({**here})
            where, loss = left.popitem()
            value = loss.detach().clone()
            self._residents.enter(Phase.BACKWARD)
            try:
                scale = self.weights.gain * engine.loss_scale.value / engine.micro_batches
                self._runner.backward(saved, {where: torch.full_like(loss, scale)})
            finally:
                self._residents.enter(Phase.FORWARD)
        return value
