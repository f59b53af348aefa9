"""The engine: one training step as a readable sequence of phases.

step = plan for a batch of this shape, or trace it
       for each part: forward through the layers, backward, gradients landing as they are made
       judge (finite? norm?)
       update what landed, layer by layer
       learn from the trace
"""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from scrimp.chunks._cuda_meter import CudaMeter
from scrimp.chunks._meter import CpuMeter
from scrimp.chunks._optim import AdamW, Optimizer, by_parameter
from scrimp.chunks._rates import measure
from scrimp.chunks._store import Store
from scrimp.chunks._table import Slot
from scrimp.engine._batch import loss_of, parts, signature, to_device
from scrimp.engine._bound import Bound, bound
from scrimp.engine._caches import no_caches
from scrimp.engine._fit import first_places
from scrimp.engine._forward import Recompute, watch_layers
from scrimp.engine._judge import LossScale, judge
from scrimp.engine._memory import Memory, resolve
from scrimp.engine._planning import Planned, Planning
from scrimp.engine._resident import Residents
from scrimp.engine._state import iter_state, load_state, save_state
from scrimp.engine._strays import Strays
from scrimp.engine._take_over import DEFAULT_CHUNK, buffers_to, table_of, take_over
from scrimp.engine._undo import Undo
from scrimp.engine._updating import Updating
from scrimp.engine._weights import Source
from scrimp.engine._world import agreed, join_world, ranks_here, share_buffers
from scrimp.errors import FitError, MoveError, RunError
from scrimp.layers import find_layers
from scrimp.ledger import Books, Ledger, format_nbytes


class Engine:
    """Trains any eager module within a device budget. The model is taken over: its parameters live in the engine."""

    def __init__(
        self,
        model: nn.Module,
        *,
        weights: Source | None = None,
        optimizer: Optimizer | None = None,
        memory: Memory | None = None,
        precision: str = "bf16",
        clip_norm: float | None = None,
        skip_nonfinite: bool = True,
        accumulate: int = 1,
        recompute: str = "auto",
        loss: Callable[[Any], torch.Tensor] | None = None,
        device: str | torch.device | None = None,
        chunk_numel: int = DEFAULT_CHUNK,
    ) -> None:
        _validate(precision, accumulate, recompute, clip_norm)
        self.model = model
        self.optimizer = optimizer or AdamW()
        self.precision = precision
        self.clip_norm = clip_norm
        self.skip_nonfinite = skip_nonfinite
        self.accumulate = accumulate
        self.loss = loss
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        if self.device.type == "cuda" and self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.budget = resolve(memory or Memory(), self.device)
        self.ledger = Books(device=Ledger(tier=str(self.device)))
        self.steps = 0
        self.skipped = 0
        self.norm: float | None = None  # of the last gradient, before clipping
        self.seconds = 0.0  # of the last step
        self.wire = join_world(self.device)
        rates = agreed(self.wire, measure(self.device))
        table = table_of(model, find_layers(model), chunk_numel, self.wire.world, wide=precision != "fp32")
        places = first_places(
            table,
            self.budget,
            precision=precision,
            states=self.optimizer.states,
            accumulate=accumulate,
            world=self.wire.world,
            ranks_here=ranks_here(self.wire),
        )
        self.store = Store(
            table,
            precision=precision,
            device=self.device,
            states=self.optimizer.states,
            accumulate=accumulate,
            books=self.ledger,
            wire=self.wire,
            places=places,
            disk=self.budget.disk,
        )
        self._meter: CpuMeter | CudaMeter
        if self.device.type == "cuda":
            self._meter = CudaMeter(self.ledger.device, self.budget.device_nbytes, self.device)
            self.store.before_change = self._meter.before_change
        else:
            self._meter = CpuMeter(self.ledger.device, self.budget.device_nbytes, self._over_budget)
        room = self.budget.device_nbytes if self.device.type == "cuda" else 0
        self.places = take_over(model, self.store, weights, room_nbytes=room)
        self._order = {name: k for k, (name, _) in enumerate(model.named_parameters())}
        self.counts: dict[str, int] = {}
        self.loss_scale = LossScale(dynamic=precision == "fp16")
        buffers = buffers_to(model, self.device)
        self.ledger.device.charge("buffers", buffers)
        for tensor in [*(t for home in self.store.homes for t in home.tensors), *self.store.flats, *model.buffers()]:
            self._meter.ignore(tensor)
        optimizers = by_parameter(self.optimizer, [s.name for layer in table.layers for s in layer.slots if s.trainable])
        staged = precision != "fp32" or clip_norm is not None
        self._updating = Updating(self.store, optimizers, self._meter, staged=staged)
        self._undo = Undo(model, self.device)
        self.residents = Residents(self.store, self._meter, self._retire)
        self._strays = Strays(self.residents)
        self.recompute = Recompute()
        watch_layers(model, self.residents, self.recompute)
        self.planning = Planning(self.store, self.recompute, recompute, rates, self.budget.plan_nbytes - buffers)
        self.planning.stage_nbytes = self._updating.stage_nbytes
        self._landed: dict[str, tuple[int, Slot]] = {}
        self._traffic = (0, 0, 0, 0)  # at the start of the last step
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._land)  # type: ignore[no-untyped-call]

    # The step.

    def step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Train on this rank's whole batch; the mean loss, detached."""
        start = time.perf_counter()
        key = signature(args, kwargs)
        while True:
            try:
                plan = self.planning.prepare(key)
            except MoveError as error:
                raise self._named(error) from error
            self._undo.begin(tracing=plan.choice is None)
            try:
                loss = self._forward_backwards(plan, args, kwargs)
                break
            except FitError as error:
                # No weight has changed yet. If there is a way that takes less, try that; not before this clause has
                # ended: the error and its cause hold the frames, and they hold the activations that did not fit.
                reason = FitError(*error.args)
            self._abandon()
            self._undo.back()
            if not (self.planning.homes_back() or self.planning.spare(plan)):
                raise reason
        self._undo.done(tracing=plan.choice is None)
        finite = self._judged()
        if finite:
            touched = self._updating.run(self._in_order(), self.steps, self.counts, self._scale)
            self.planning.saw_update(*touched)
        else:
            self.skipped += 1
            for layer, slot in self._landed.values():
                self.store.restore(layer, slot)
        self.steps += 1
        if self._traced:
            for tensor in self.planning.digest(plan, self._trace, self.residents.kept_nbytes, self.residents.timing.best):
                self._meter.ignore(tensor)
        self.seconds = time.perf_counter() - start
        return loss

    def _forward_backwards(self, plan: Planned, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        self._landed.clear()
        losses = []
        self.model.train()
        moved = self.store.traffic
        self._traffic = (moved.up_nbytes, moved.down_nbytes, moved.read_nbytes, moved.written_nbytes)
        try:
            share_buffers(self.wire, self.model)
            with no_caches(self.model), self._metered(args, kwargs):
                self.residents.begin_step(self.steps, plan.choice.schedule if plan.choice else None, plan.expected)
                for part_args, part_kwargs in parts(args, kwargs, self.accumulate):
                    losses.append(self._forward_backward(part_args, part_kwargs))
                    self.residents.retire_rest()
                self._traced, self._trace = self.residents.end_step()
        except MoveError as error:
            raise self._named(error) from error
        return torch.stack(losses).mean()

    def _forward_backward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        self._part_landed: set[str] = set()
        args, kwargs = to_device(args, kwargs, self.device, self.store.dtype)
        looking = self._strays if self._strays.found or self.residents.tracing else nullcontext()
        with self.residents.saving(), looking:
            out = self.model(*args, **kwargs)
            loss = loss_of(self.loss(out) if self.loss is not None else out)
            del out
        value = loss.detach().clone()
        if self.loss_scale.value != 1:
            loss = loss * self.loss_scale.value
        if self.accumulate > 1:
            loss = loss / self.accumulate
        self.residents.say("backward")
        loss.backward()  # type: ignore[no-untyped-call]
        return value

    def _land(self, parameter: torch.Tensor) -> None:
        layer, slot = self.places[id(parameter)]
        if slot.name in self._part_landed:
            raise RunError(
                f"a second gradient for {slot.name} in one backward: use checkpoint(..., use_reentrant=False), "
                "and call backward once per step"
            )
        assert parameter.grad is not None
        self.residents.before_landing(layer)
        self.store.land(layer, slot, parameter.grad, first=slot.name not in self._landed)
        parameter.grad = None
        self._part_landed.add(slot.name)
        self.residents.landed(layer, slot)

    def _retire(self, layer: int, slots: list[Slot]) -> None:
        """All of a layer's gradients of this micro-batch are there (or no more will come)."""
        self.store.retire(layer, [(slot, slot.name not in self._landed) for slot in slots])
        self._landed.update({slot.name: (layer, slot) for slot in slots})

    def _judged(self) -> bool:
        """Whether to update: finite gradients, if that was asked for; sets the scale that clips the norm."""
        self._scale: torch.Tensor | None = None
        self.store.lanes.settle()
        self.residents.timing.end()
        must_be_finite = self.skip_nonfinite or self.loss_scale.dynamic
        if not must_be_finite and self.clip_norm is None:
            return True
        try:
            verdict = judge(self.store, self._in_order(), clip=self.clip_norm, loss_scale=self.loss_scale.value)
        except MoveError as error:
            raise self._named(error) from error
        self.loss_scale.saw(finite=verdict.bad is None)
        if verdict.bad is not None and must_be_finite:
            if not self.loss_scale.dynamic:
                warnings.warn(f"step {self.steps}: gradient of {verdict.bad} is not finite; the update is skipped", stacklevel=3)
            return False
        self.norm, self._scale = verdict.norm, verdict.scale
        return True

    # Looking at it.

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Forward without gradients, through the same residency; the model is in eval mode."""
        self.model.eval()
        try:
            while True:
                try:
                    with self._metered(args, kwargs), torch.no_grad(), self.residents.aside(), self._strays:
                        here, there = to_device(args, kwargs, self.device, self.store.dtype)
                        return self.model(*here, **there)
                except FitError as error:
                    reason = FitError(*error.args)
                self.residents.abandon()
                if not self.planning.homes_back():
                    raise reason
        finally:
            self.model.train()

    def bound(self) -> Bound:
        """The least traffic and time of a step like the last one, beside what it took."""
        moved = self.store.traffic
        now = (moved.up_nbytes, moved.down_nbytes, moved.read_nbytes, moved.written_nbytes)
        moved_now = [b - a for a, b in zip(self._traffic, now, strict=True)]
        return bound(self.planning, moved_now, self.residents.timing.best, self.seconds)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """All parameters in fp32 and all buffers, on the CPU; with several ranks on rank 0, and nothing on the others."""
        state = {}
        for name, tensor in self.iter_state():
            if self.wire.rank == 0:
                state[name] = tensor
        return state

    def iter_state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every parameter in fp32 by every name it has, and every buffer; every rank gets all of them, one at a time."""
        return iter_state(self)

    def save(self, folder: str | Path) -> None:
        """Write a checkpoint: weights, masters, states, step and random state; complete or not there at all."""
        save_state(self, folder)

    def load(self, folder: str | Path) -> None:
        """Go on from a checkpoint, whatever budget, chunk size and number of ranks it was written with."""
        load_state(self, folder)

    def close(self) -> None:
        """Give the device back: layers go, and the cap on the allocator is lifted. The host keeps the state."""
        self.residents.abandon()
        self.planning.homes_back()
        self._meter.close()

    # Parts.

    def _in_order(self) -> list[tuple[int, Slot]]:
        """What landed, in the model's order: the order of sums must not depend on the order of arrival."""
        return sorted(self._landed.values(), key=lambda place: self._order[place[1].name])

    def _named(self, error: MoveError) -> RunError:
        return RunError(f"rank {self.wire.rank}, step {self.steps}, {self.residents.place()}: {error}")

    @contextmanager
    def _metered(self, args: Any, kwargs: Any) -> Iterator[None]:
        batch = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        with self._meter:
            for tensor in batch:
                self._meter.count(tensor, "buffers")
            try:
                yield
            except torch.cuda.OutOfMemoryError as error:
                raise FitError(f"step {self.steps}: {error}; the ledger has {self.ledger.snapshot()}") from error
            finally:
                for tensor in batch:
                    self._meter.forget(tensor)

    def _over_budget(self, perhaps: bool) -> None:
        self.residents.make_room()
        if not perhaps and self.ledger.total_nbytes > self.budget.device_nbytes:
            raise FitError(
                f"step {self.steps} needs {format_nbytes(self.ledger.total_nbytes)} on the device, the budget is "
                f"{format_nbytes(self.budget.device_nbytes)} ({self.ledger.snapshot()}). "
                + ("Use recompute='all' or a smaller batch" if self.planning.mode == "none" else "Use a smaller batch")
                + ", more accumulate, or a larger Memory(device=...)"
            )

    def _abandon(self) -> None:
        """Undo a step that failed before the update: weights again where gradients stood."""
        gc.collect()  # graphs that failed half-way are cycles
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        for parameter in self.model.parameters():
            parameter.grad = None
        self.residents.abandon()
        self.store.lanes.settle()
        for layer, slot in self._landed.values():
            self.store.restore(layer, slot)
        for layer, space in enumerate(self.store.table.layers):
            if self.store.anchored(layer):  # gradients that stand there without having been retired
                for slot in space.slots[: sum(slot.trainable for slot in space.slots)]:
                    self.store.restore(layer, slot)
        self._landed.clear()
        self.ledger.reset_peak()


def _validate(precision: str, accumulate: int, recompute: str, clip_norm: float | None) -> None:
    if precision not in ("bf16", "fp16", "fp32"):
        raise RunError(f"precision {precision!r} is not one of 'bf16', 'fp16', 'fp32'")
    if isinstance(accumulate, bool) or not isinstance(accumulate, int) or accumulate < 1:
        raise RunError(f"accumulate={accumulate!r}: it is the number of parts a batch is split into, 1 or more")
    if recompute not in ("auto", "none", "all"):
        raise RunError(f"recompute={recompute!r} is not one of 'auto', 'none', 'all'")
    if clip_norm is not None and not clip_norm > 0:
        raise RunError(f"clip_norm={clip_norm!r} must be more than 0")
