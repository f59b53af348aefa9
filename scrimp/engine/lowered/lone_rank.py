"""One rank of a plan without the others: the parts of an engine that a planned step needs, on any device, meta included.

The program, the generated source, the chunk table, the store, the buckets and the update are those of `Training`. What differs is
given: a communicator that reaches nobody, and a meter. Nothing is adopted: the model stays as it is, and weights have no meaning.
All model data is on the device, as it is where a plan fits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from scrimp.chunks import DEVICE, DTYPES, Meter, Optimizer, Rules, Slot, Store, Wire, gradient_norm, settings_by_group
from scrimp.engine.lowered.graph import graph_of
from scrimp.engine.lowered.passes import MeteredRanks, PlannedPasses
from scrimp.engine.lowered.program import check_settings, lowered_program, micro_batches_of, stages_of
from scrimp.engine.lowered.rank import PlannedRank
from scrimp.engine.lowered.table import planned_table
from scrimp.engine.observe.timeline import AFTER, UPDATE, Points, watching
from scrimp.engine.setup.param_groups import named
from scrimp.engine.step.context import StepContext
from scrimp.engine.step.phase import Phase
from scrimp.engine.step.residency import Residents
from scrimp.engine.update.grad_check import LossScale
from scrimp.engine.update.update import Updating
from scrimp.errors import RunError
from scrimp.ledger import Books
from scrimp.lower import Generated
from scrimp.move import Peers
from scrimp.planner import Plan

STD = 0.02  # of random weights


class LoneRank:
    """Implements `Stepping`. `rank`: among the ranks of all stages. `comm`: of this rank's stage. `peers`: None without
    stages. `staged`: gradients are cast in a staging buffer before the update."""

    pending = 0

    def __init__(
        self,
        plan: Plan,
        model: nn.Module,
        *,
        rank: int,
        optimizer: Optimizer,
        device: torch.device,
        comm: MeteredRanks,
        peers: Peers | None,
        meter: Meter,
        books: Books,
        staged: bool,
    ) -> None:
        precision = precision_of(plan)
        check_settings(plan, optimizer, precision)
        self.device, self.ledger, self.meter = device, books, meter
        self.micro_batches = micro_batches_of(plan)
        self.steps = 0
        self.current = StepContext()
        self.loss_scale = LossScale(dynamic=precision == "fp16")
        self.program = lowered_program(plan, graph_of(plan, model, Wire()), rank)
        planned = PlannedRank(
            program=self.program, all_ranks=Wire(), stage=Wire(), comm=comm, peers=peers, axis=None, across=Wire()
        )
        table, at = planned_table(self.program, str(DTYPES[precision]).removeprefix("torch."))
        settings = named(optimizer, model)
        self._rules = Rules(settings_by_group(settings, [s.name for layer in table.layers for s in layer.slots if s.trainable]))
        self.store = Store(
            table, precision=precision, device=device, optimizer=settings, micro_batches=self.micro_batches, books=books,
            wire=Wire(), places=[DEVICE] * len(table.layers), tiling=planned.tiling,
        )  # fmt: skip
        buffers = Buffers(model, device)
        books.device.charge("buffers", buffers.nbytes)
        for tensor in (*(t for each in self.store.placements for t in each.tensors), *self.store.flats, *buffers.values):
            meter.ignore(tensor)
        self._updating = Updating(self.store, self._rules, meter, staged=staged)
        self._residents = Residents(self.store, meter, self._retire, lambda: None)
        self.passes: PlannedPasses = planned.passes(self.store, self._residents, buffers, self._take, at)
        self.passes._model = model
        self._order = {name: k for k, (name, _) in enumerate(model.named_parameters(remove_duplicate=False))}
        self._counts: dict[str, int] = {}
        if device.type != "meta":
            for placement in self.store.placements:
                placement.weights.normal_(std=STD)
        self.passes.weights.updates = 1  # as in every step but the first: shares that others updated are gathered

    @property
    def input_dtype(self) -> torch.dtype:
        return self.store.dtype

    @property
    def runners(self) -> list[Generated]:
        return self.passes.runners

    def close(self) -> None:
        self._updating.end()

    # The step, as in `Training`.

    def step(self, args: tuple[Any, ...], kwargs: dict[str, Any], points: Points, *, metered: bool) -> None:
        """Forward and backward of all micro-batches, then the update."""
        self._rules.begin(self.steps, self._rules.first)
        self.current = StepContext()
        todo = self.passes.parts(self, args, kwargs, self.micro_batches)
        losses = []
        with self.meter if metered else nullcontext(), watching(self.runners, points):
            self._residents.enter(Phase.FORWARD)
            try:
                self._residents.begin_step(self.steps, None, metering=metered)
                for k, run_part in enumerate(todo):
                    self.current.last_part = k == len(todo) - 1
                    losses.append(run_part())
                    self._residents.retire_rest()
                self._residents.end_step()
            finally:
                self._residents.enter(Phase.IDLE)
        losses.clear()
        points.end(AFTER)
        self._finish()
        points.end(UPDATE)
        self.steps += 1

    def _finish(self) -> None:
        arrived = sorted(self.current.arrived.values(), key=lambda place: self._order[place[1].name])
        self.passes.weights.complete([slot.name for _, slot in arrived])
        if self.device.type != "meta":
            for layer, slot in arrived:
                for gradient in self.store.gradients_of(layer, slot):
                    gradient_norm(gradient)
            self._updating.run(arrived, self.steps, self._counts, None)
            return
        stage_nbytes = self._updating.stage_nbytes
        self.ledger.device.charge("temporaries", stage_nbytes)
        for layer in {layer for layer, _ in arrived}:
            self.store.settled(layer)
        self.ledger.device.free("temporaries", stage_nbytes)

    def _take(self, layer: int, slot: Slot, gradient: torch.Tensor) -> None:
        first = slot.name not in self.current.arrived
        self.current.arrived[slot.name] = (layer, slot)
        with self._residents.quietly():
            self.store.take(layer, slot, gradient, first=first)
            self.current.part_arrived.add(slot.name)

    def _retire(self, layer: int, slots: list[Slot]) -> None:
        self.current.arrived.update({slot.name: (layer, slot) for slot in slots})


class Buffers(nn.Module):
    """The model's buffers on another device, by the model's names. Buffers on meta become zeros elsewhere."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        super().__init__()
        self._made: dict[int, torch.Tensor] = {}
        self._names = {name: self._on(buffer, device) for name, buffer in model.named_buffers(remove_duplicate=False)}
        every = (buffer for module in model.modules() for buffer in module._buffers.values() if buffer is not None)
        self.nbytes = sum(buffer.nbytes for buffer in every)  # as `buffers_to` counts them
        self.values = tuple(self._made.values())

    def _on(self, buffer: torch.Tensor, device: torch.device) -> torch.Tensor:
        if id(buffer) not in self._made:
            away = buffer.is_meta and device.type != "meta"
            self._made[id(buffer)] = torch.zeros_like(buffer, device=device) if away else buffer.detach().to(device, copy=True)
        return self._made[id(buffer)]

    def named_buffers(self, *_: Any, **__: Any) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._names.items()


def precision_of(plan: Plan) -> str:
    """The engine's precision for a plan."""
    return "bf16" if plan.precision.startswith("megatron") else plan.precision


def stage_of(plan: Plan, rank: int) -> tuple[int, int]:
    """The stage of a rank, and its rank there. Raises `RunError` if the plan has no such rank."""
    ranks = stages_of(plan) * plan.mesh.size
    if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < ranks:
        raise RunError(f"rank={rank!r}: the plan is for {ranks} ranks, 0 to {ranks - 1}")
    return divmod(rank, plan.mesh.size)
