"""The training step as a readable sequence of phases; `Engine` is the public wrapper.

step = look up the plan for this batch shape, or trace the step
       for each micro-batch: forward, backward; each layer's gradients leave the device as backward produces them
       check all gradients (finite? global norm?)
       update layer by layer
       plan the next steps from the trace
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import astuple
from typing import Any

import torch
from torch import nn

from scrimp._arguments import activations_of
from scrimp.chunks import (
    DTYPES,
    CpuMeter,
    CudaMeter,
    Meter,
    Optimizer,
    Rules,
    Slot,
    Store,
    Wire,
    measure_rates,
    settings_by_group,
)
from scrimp.engine._eager_passes import EagerPasses
from scrimp.engine.entry.accumulation import Accumulating
from scrimp.engine.entry.between_steps import Between
from scrimp.engine.entry.optimizer_handle import Handle
from scrimp.engine.entry.rank_calls import Calls, begin_call, meeting, naming_calls
from scrimp.engine.entry.resize import Alone, leave
from scrimp.engine.gradients.dense import DenseExchange
from scrimp.engine.gradients.planned import PlannedExchange
from scrimp.engine.gradients.planned_sparse import PlannedSparseExchange, sparse_nbytes
from scrimp.engine.gradients.protocol import Exchange
from scrimp.engine.gradients.sparse import SparseExchange
from scrimp.engine.lowered.passes import PlannedPasses, taking
from scrimp.engine.lowered.program import check_arguments, micro_batches_of, places_of
from scrimp.engine.lowered.rank import planned_rank
from scrimp.engine.lowered.table import planned_table
from scrimp.engine.observe.timeline import AFTER, UPDATE, Recorder
from scrimp.engine.schedule.engine_planning import planning_of
from scrimp.engine.schedule.metering_policy import MeteringPolicy
from scrimp.engine.schedule.planned import Planned
from scrimp.engine.setup.adopt import adopt, buffers_to, table_of
from scrimp.engine.setup.budget import Memory, memory_of, resolve
from scrimp.engine.setup.initial_placement import Fit
from scrimp.engine.setup.meta_parameters import MetaParameters
from scrimp.engine.setup.param_groups import named
from scrimp.engine.setup.process_groups import Group, agreed, join_world, least_of_all, ranks_here, training_group, who_shares
from scrimp.engine.setup.special_modules import check_modules
from scrimp.engine.setup.validate import (
    check_exchange,
    check_group,
    check_model,
    check_settings,
    mesh_of,
    optimizer_of,
    pick_device,
)
from scrimp.engine.setup.weight_sources import Source
from scrimp.engine.step.attempts import compute_gradients
from scrimp.engine.step.batch import signature
from scrimp.engine.step.context import StepContext, running, warn_of_eval
from scrimp.engine.step.interrupts import Interrupts, in_one_piece
from scrimp.engine.step.layer_forward import Recompute, wrap_layers
from scrimp.engine.step.messages import check_gradient, does_not_fit
from scrimp.engine.step.parameter_hooks import Hooks, receiving, run_hooks
from scrimp.engine.step.phase import Phase
from scrimp.engine.step.residency import Residents
from scrimp.engine.step.rollback import Rollback
from scrimp.engine.update.grad_check import LossScale
from scrimp.engine.update.update import Updating
from scrimp.errors import MoveError, RunError
from scrimp.exchange import Dense, Sparse
from scrimp.layers import find_layers, no_caches
from scrimp.layout import Mesh
from scrimp.ledger import Books, Ledger
from scrimp.planner import Plan
from scrimp.report import RunWriter


class Training(Between, Accumulating):
    """All parts of an engine, and the step that uses them in order. `Engine` documents the arguments."""

    def __init__(
        self,
        model: nn.Module,
        *,
        weights: Source | None,
        plan: Plan | None,
        optimizer: Optimizer | str | None,
        memory: Memory | int | str | None,
        precision: str,
        exchange: Dense | Sparse | None,
        mesh: Mesh | str | None,
        clip_norm: float | None,
        skip_nonfinite: bool,
        micro_batches: int,
        reduction: str,
        activations: str | Iterable[str],
        loss: Callable[[Any], torch.Tensor] | None,
        cast_inputs: bool,
        device: str | torch.device | None,
        chunk_numel: int,
        group: Group,
    ) -> None:
        check_model(model)
        optimizer, memory, mesh = optimizer_of(optimizer), memory_of(memory), mesh_of(mesh)
        if plan is not None:
            check_arguments(plan, activations=activations, mesh=mesh, loss=loss, chunk_numel=chunk_numel, reduction=reduction)
            micro_batches = micro_batches_of(plan, micro_batches)
        ways = activations_of(activations, RunError)
        check_settings(precision, micro_batches, reduction, ways, clip_norm)
        check_modules(model)
        check_exchange(exchange, optimizer, precision, memory)
        check_group(group, plan, mesh, exchange)
        self.model, self.plan = model, None if plan is None else plan.bare()
        self.run_folder: RunWriter | None = None  # that `Progress` fills
        settings = named(optimizer, model)
        self.precision = precision
        self.clip_norm = clip_norm
        self.skip_nonfinite = skip_nonfinite
        self.micro_batches, self.reduction = micro_batches, reduction
        self.loss = loss
        self.cast_inputs = cast_inputs  # floating-point tensors of a batch, to the precision of the weights
        self.device = pick_device(device)
        self.group = training_group(join_world(self.device), group)
        self.wire = self.group.wire
        self.interrupts = Interrupts()
        self.calls = Calls(self.wire, self.interrupts.check)
        self.meeting = meeting(self.group, self.calls)  # of all ranks, also those that do not train
        self.alone = Alone(budget=resolve(memory, self.device), rates=measure_rates(self.device), chunk_numel=chunk_numel)
        self.budget = least_of_all(self.wire, self.alone.budget)
        self.ledger = Books(device=Ledger(tier=str(self.device)))
        self.steps, self.skipped = 0, 0
        self.norm: float | None = None  # of the last gradient, before clipping
        self.seconds = 0.0  # wall time of the last step
        self.host_seconds = (0.0, 0.0)  # of the last step: seconds the host worker was busy, seconds others waited for it
        rates = agreed(self.wire, self.alone.rates)
        planned = None if plan is None else planned_rank(plan, model, self.wire, settings, precision, self.device, exchange)
        if planned is None:
            sharing, across = who_shares(self.wire, mesh, exchange)
            table = table_of(model, find_layers(model), chunk_numel, sharing.world, wide=precision != "fp32")
        else:
            sharing, across = Wire(), planned.across
            table, at = planned_table(planned.program, str(DTYPES[precision]).removeprefix("torch."))
            more_nbytes = sparse_nbytes(table, exchange, across.world, self.device)
        groups = settings_by_group(settings, [s.name for layer in table.layers for s in layer.slots if s.trainable])
        self.rules = Rules(groups)
        self.fit = Fit(
            table,
            self.budget,
            precision=precision,
            optimizer=settings,
            micro_batches=micro_batches,
            world=sharing.world,
            ranks_here=ranks_here(self.wire),
            residual=exchange.least_residual if isinstance(exchange, Sparse) and exchange.density < 1 else None,
        )
        self.store = Store(
            table,
            precision=precision,
            device=self.device,
            optimizer=settings,
            micro_batches=micro_batches,
            books=self.ledger,
            wire=sharing,
            ranks=self.wire,
            places=None
            if self.group.outside
            else self.fit.places()
            if planned is None
            else places_of(planned.program, self.budget, self.fit, table, more_nbytes),
            disk=self.budget.disk,
            sparse=isinstance(exchange, Sparse),
            host_room_nbytes=self.fit.room_nbytes,
            tiling=None if planned is None else planned.tiling,
            outside=self.group.outside,
        )
        self.meter: Meter
        if self.device.type == "cuda":
            self.meter = CudaMeter(self.ledger.device, self.budget.device_nbytes, self.device)
            self.store.before_change = self.meter.before_change
        else:
            self.meter = CpuMeter(self.ledger.device, self.budget.device_nbytes, self._over_budget)
        room = self.budget.device_nbytes - self.ledger.device.total_nbytes if self.device.type == "cuda" else 0
        self._hooks = Hooks(micro_batches=micro_batches, planned=plan is not None)
        taken = adopt(model, self.store, weights, hooks=self._hooks, room_nbytes=room)
        self.places = taken.places
        self.weights = dict(model.named_parameters(remove_duplicate=False))
        self._order = {name: k for k, name in enumerate(self.weights)}
        self.counts: dict[str, int] = {}
        self.loss_scale = LossScale(dynamic=precision == "fp16")
        self.ledger.device.charge("buffers", buffers_to(model, self.device))
        self.meter.begin()
        for tensor in [*(each for p in self.store.placements for each in p.tensors), *self.store.flats, *model.buffers()]:
            self.meter.ignore(tensor)
        self.updating = Updating(self.store, self.rules, self.meter, staged=precision != "fp32" or clip_norm is not None)
        self.store.own = self.meter.ignore
        self.rollback = Rollback(model, self.device)
        self.residents = Residents(self.store, self.meter, self._retire, self.interrupts.check)
        self.metering = MeteringPolicy(self.meter, self.ledger.device)
        self.recompute = Recompute()
        for whole in self.weights.values() if planned is not None else ():
            self.meter.ignore(whole)
        self.passes: EagerPasses | PlannedPasses
        if planned is None:
            wrap_layers(model, self.residents, self.recompute)
            self.passes = EagerPasses(self.residents)
        else:
            self.passes = planned.passes(self.store, self.residents, model, taking(weakref.ref(self)), at)
        make = SparseExchange if planned is None else PlannedSparseExchange
        sparse = make(exchange, self.store, self.rules, across) if isinstance(exchange, Sparse) else None
        self.exchanging: Exchange = sparse or (DenseExchange() if planned is None else PlannedExchange())
        self.planning = planning_of(self, ways, rates, sparse=sparse, stage=None if planned is None else planned.stage)
        self.closed = False
        self.recorder: Recorder | None = None  # of memory over the points of a planned step
        self.broken: str | None = None  # why the weights are not those of any step
        self.current = StepContext(traffic=astuple(self.store.traffic))  # of the step that runs, or of the last one
        for parameter in {id(parameter): parameter for parameter in self.weights.values()}.values():
            if parameter.requires_grad and planned is None:
                parameter.register_post_accumulate_grad_hook(receiving(weakref.ref(self)))  # type: ignore[no-untyped-call]
        self.meta_parameters = MetaParameters(model, self.weights, taken, self._hooks, self.device)
        of_name = dict(model.named_parameters(remove_duplicate=False))
        self.optimizer = Handle(settings, [(first, [of_name[name] for name in names]) for first, names in groups])
        self.optimizer.follow(weakref.ref(self))
        if self.group.outside:
            leave(self)

    # The step.

    @in_one_piece
    def step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        begin_call(self, "step")
        with naming_calls(self):
            return self._step(args, kwargs)

    def _step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        start = time.perf_counter()
        self._admit()
        # Forward and backward of all micro-batches, tried until they fit: step/attempts.py calls `run_micro_batches`.
        plan, loss = compute_gradients(self, signature(args, kwargs), args, kwargs)
        if self.recorder is not None:
            self.recorder.end(AFTER)
        self.finish()  # the rest of the exchange, the gradient check, the update
        if self.recorder is not None:
            self.recorder.end(UPDATE)
        self._learn(plan, start)
        return loss

    def _admit(self) -> None:
        """Check that the engine can step, and fix the optimizer's settings for this step."""
        self.check_usable()
        warn_of_eval(self.model, self.steps)
        self.rules.begin(self.steps, self.optimizer.now(self.steps))
        self.planning.checked = self.must_check
        self.planning.call = [*self.calls.row, self.rules.digest(self.steps)]

    def _learn(self, plan: Planned, start: float) -> None:
        """Make the schedule of the next steps from the trace of this one, if it was traced."""
        self.planning.learn(plan, self.current.trace, self.residents)
        self.seconds = time.perf_counter() - start
        self.host_seconds = self.updating.waited()

    def finish(self) -> None:
        """Run the gradient check and the optimizer update with the gradients that have arrived."""
        try:
            self.exchanging.finish(self)
        except BaseException as error:
            self.broken = f"step {self.steps} failed in its update ({type(error).__name__}: {error})"
            if isinstance(error, MoveError):
                raise self.named_error(error) from error
            raise
        self.steps += 1
        self.optimizer.counted()

    def run_micro_batches(self, plan: Planned, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        if not self.pending:
            self.current = StepContext()
            self.exchanging.begin(self)
        self.current.begin(astuple(self.store.traffic))
        losses, count = [], 1 if self.accumulating else self.micro_batches
        todo = self.passes.parts(self, args, kwargs, count)
        try:
            metered = self.metering.step(plan, self.steps)
            with running(self, *self.passes.lent(args, kwargs), Phase.FORWARD, metered), no_caches(self.model):
                schedule = plan.choice.schedule if plan.choice else None
                self.residents.begin_step(self.steps, schedule, plan.expected, metering=self.metering.metering)
                for k, run_part in enumerate(todo):
                    self.current.last_part = k == count - 1 and not self.accumulating
                    losses.append(run_part())
                    self.residents.retire_rest()
                traced, schedule_steps = self.residents.end_step()
                self.current.trace = schedule_steps if self.metering.learn(plan, schedule_steps, traced=traced) else None
                if not self.current.arrived and self.passes.trains:
                    raise RunError("no trained parameter got a gradient: the loss depends on none of them")
        except MoveError as error:
            raise self.named_error(error) from error
        return torch.stack(losses).mean() if self.reduction == "mean" else torch.stack(losses).sum()

    @property
    def under_plan(self) -> PlannedPasses:
        if not isinstance(self.passes, PlannedPasses):
            raise RunError("the engine has no plan: every rank takes its own batch")
        return self.passes

    def receive(self, parameter: torch.Tensor) -> None:
        self.interrupts.check()
        layer, slot = self.places[id(parameter)]
        hooks = self._hooks.of(parameter)
        if hooks:
            self.residents.touch(layer)  # a hook may read the weight
            if not run_hooks(hooks, parameter, slot.name):
                return
        assert parameter.grad is not None
        check_gradient(
            slot.name,
            parameter.grad,
            in_backward=self.residents.phase is Phase.BACKWARD,
            again=slot.name in self.current.part_arrived,
        )
        with self.residents.quietly():
            self.exchanging.receive(self, layer, slot, parameter.grad, first=slot.name not in self.current.arrived)
            parameter.grad = None
            self.current.part_arrived.add(slot.name)
            self.residents.arrived(layer, slot)

    def take(self, layer: int, slot: Slot, gradient: torch.Tensor) -> None:
        """Receive a gradient of a planned step, flat, or one summand of it; the residents hear of it when its layer's backward is
        done."""
        self.interrupts.check()
        first = slot.name not in self.current.arrived
        self.current.arrived[slot.name] = (layer, slot)  # before the exchange, so that an error undoes it too
        with self.residents.quietly():
            self.exchanging.receive(self, layer, slot, gradient, first=first)
            self.current.part_arrived.add(slot.name)

    def _retire(self, layer: int, slots: list[Slot]) -> None:
        """All of a layer's gradients of this micro-batch have arrived, or no more will come."""
        arrived = [(slot, slot.name not in self.current.arrived) for slot in slots]
        self.current.arrived.update(
            {slot.name: (layer, slot) for slot in slots}
        )  # before the exchange, so that an error undoes them too
        self.exchanging.retire(self, layer, arrived)

    @property
    def must_check(self) -> bool:
        """Whether all gradients must be checked before any update starts."""
        return self.skip_nonfinite or self.loss_scale.dynamic or self.clip_norm is not None

    @property
    def input_dtype(self) -> torch.dtype | None:
        return self.store.dtype if self.cast_inputs else None

    def check_usable(self, *, reading: bool = False) -> None:
        """`reading`: for calls that a closed engine still allows."""
        if not reading:
            self.check_open()
        self.meta_parameters.check_closed()
        self.updating.check()
        self.exchanging.check()
        if self.broken is not None:
            raise RunError(
                f"{self.broken}: some weights are new, some old, some gone; load the last checkpoint: engine.load(folder)"
            )

    def wait(self) -> None:
        """Wait until all updates that overlap with steps are done."""
        self.store.wait()

    # Parts.

    def in_order(self, *, every: bool = False) -> list[tuple[int, Slot]]:
        """The gradients that arrived, in the model's order, so that the order of sums does not depend on the order of arrival.
        `every`: those of all trained parameters."""
        trained = ((k, slot) for k, layer in enumerate(self.store.table.layers) for slot in layer.slots if slot.trainable)
        places = trained if every else self.current.arrived.values()
        return sorted(places, key=lambda place: self._order[place[1].name])

    def named_error(self, error: MoveError) -> RunError:
        where = self.passes.where(error) or self.residents.place()
        others = self.calls.reports(f"step {self.steps}, {where}") if isinstance(self.passes, PlannedPasses) else ""
        return RunError(f"rank {self.wire.rank}, step {self.steps}, {where}: {error}{others}")

    def _over_budget(self, perhaps: bool) -> None:
        self.residents.make_room()
        if not perhaps and self.ledger.total_nbytes > self.meter.budget_nbytes:
            raise does_not_fit(self.steps, self.ledger, self.meter, self.model, self.planning.ways)
