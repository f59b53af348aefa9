"""The engine: one training step as a readable sequence of phases.

step = plan for a batch of this shape, or trace it
       for each part: forward through the layers, backward, gradients landing as they are made
       judge (finite? norm?)
       update what landed, layer by layer
       learn from the trace
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import astuple
from typing import Any

import torch
from torch import nn

from scrimp.chunks._cuda_meter import CudaMeter
from scrimp.chunks._meter import CpuMeter
from scrimp.chunks._optim import AdamW, Optimizer, grouped
from scrimp.chunks._rates import measure
from scrimp.chunks._residency import Moment
from scrimp.chunks._rules import Rules
from scrimp.chunks._store import Store
from scrimp.chunks._table import Slot
from scrimp.engine._accumulating import Accumulating
from scrimp.engine._advice import check_landing, check_loss, does_not_fit
from scrimp.engine._attempts import gradients
from scrimp.engine._batch import loss_of, parts, signature, to_device
from scrimp.engine._between import Between
from scrimp.engine._calls import Calls, called, explained
from scrimp.engine._dense import DenseExchange
from scrimp.engine._fit import Fit
from scrimp.engine._forward import Recompute, watch_layers
from scrimp.engine._groups import named
from scrimp.engine._handle import Handle
from scrimp.engine._hooks import Hooks, landing, run_hooks
from scrimp.engine._interrupts import Interrupts, in_one_piece
from scrimp.engine._judge import LossScale
from scrimp.engine._memory import Memory, resolve
from scrimp.engine._modes import warn_of_eval
from scrimp.engine._modules import check_modules
from scrimp.engine._planning import Planned, Planning
from scrimp.engine._resident import Residents
from scrimp.engine._running import running
from scrimp.engine._settings import check_exchange, pick_device, validate
from scrimp.engine._sparse import SparseExchange
from scrimp.engine._stand_ins import StandIns
from scrimp.engine._strays import Strays, StraysInBackward
from scrimp.engine._take_over import DEFAULT_CHUNK, buffers_to, table_of, take_over
from scrimp.engine._undo import Undo
from scrimp.engine._updating import Updating
from scrimp.engine._watched import Watched
from scrimp.engine._weights import Source
from scrimp.engine._world import agreed, join_world, least_of_all, ranks_here, who_shares
from scrimp.errors import MoveError, RunError
from scrimp.exchange import Dense, Sparse
from scrimp.layers import find_layers
from scrimp.layers._caches import no_caches
from scrimp.layout import Mesh
from scrimp.ledger import Books, Ledger


class Engine(Between, Accumulating):
    """Trains any eager module within a device budget. The model is taken over: its parameters live in the engine.

    `weights`: values for a model, perhaps on meta: a state dict, a .safetensors file, a Hugging Face folder. `precision`:
    "bf16", "fp16" or "fp32", masters being fp32. `accumulate`: parts that a batch is split into. `recompute`:
    "auto" (what must be), "none" or "all". `loss` makes the loss of what the model returns, if that has none. `exchange`: how
    gradients travel between ranks, `Dense()` or `Sparse(...)`; on a `mesh` of two axes, such as Mesh({"node": 2, "gpu": 4}),
    sparsely over the first alone, and over the second homes are shared.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        weights: Source | None = None,
        optimizer: Optimizer | None = None,
        memory: Memory | None = None,
        precision: str = "bf16",
        exchange: Dense | Sparse | None = None,
        mesh: Mesh | None = None,
        clip_norm: float | None = None,
        skip_nonfinite: bool = True,
        accumulate: int = 1,
        recompute: str = "auto",
        loss: Callable[[Any], torch.Tensor] | None = None,
        cast_inputs: bool = True,
        device: str | torch.device | None = None,
        chunk_numel: int = DEFAULT_CHUNK,
    ) -> None:
        validate(model, optimizer, memory, precision, accumulate, recompute, clip_norm)
        check_modules(model)
        check_exchange(exchange, optimizer or AdamW(), precision, memory)
        self.model = model
        settings = named(optimizer or AdamW(), model)
        self.precision = precision
        self.clip_norm = clip_norm
        self.skip_nonfinite = skip_nonfinite
        self.accumulate = accumulate
        self.loss = loss
        self.cast_inputs = cast_inputs  # floating-point tensors of a batch, to the precision of the weights
        self.device = pick_device(device)
        self.wire = join_world(self.device)
        self.interrupts = Interrupts()
        self.calls = Calls(self.wire, self.interrupts.check)
        self.budget = least_of_all(self.wire, resolve(memory or Memory(), self.device))
        self.ledger = Books(device=Ledger(tier=str(self.device)))
        self.steps, self.skipped = 0, 0
        self.norm: float | None = None  # of the last gradient, before clipping
        self.seconds = 0.0  # of the last step
        self.host_seconds = (0.0, 0.0)  # since the step before: of the host's worker at work, of others waiting for it
        rates = agreed(self.wire, measure(self.device))
        sharing, across = who_shares(self.wire, mesh, sparse=isinstance(exchange, Sparse))
        table = table_of(model, find_layers(model), chunk_numel, sharing.world, wide=precision != "fp32")
        groups = grouped(settings, [s.name for layer in table.layers for s in layer.slots if s.trainable])
        self.rules = Rules(groups)
        self.fit = Fit(
            table,
            self.budget,
            precision=precision,
            optimizer=settings,
            accumulate=accumulate,
            world=sharing.world,
            ranks_here=ranks_here(self.wire),
            residual=exchange.least_residual if isinstance(exchange, Sparse) and exchange.density < 1 else None,
        )
        self.store = Store(
            table,
            precision=precision,
            device=self.device,
            optimizer=settings,
            accumulate=accumulate,
            books=self.ledger,
            wire=sharing,
            ranks=self.wire,
            places=self.fit.places(),
            disk=self.budget.disk,
            sparse=isinstance(exchange, Sparse),
        )
        self.store.host_room_nbytes = self.fit.room_nbytes
        self.meter: CpuMeter | CudaMeter
        if self.device.type == "cuda":
            self.meter = CudaMeter(self.ledger.device, self.budget.device_nbytes, self.device)
            self.store.before_change = self.meter.before_change
        else:
            self.meter = CpuMeter(self.ledger.device, self.budget.device_nbytes, self._over_budget)
        room = self.budget.device_nbytes - self.ledger.device.total_nbytes if self.device.type == "cuda" else 0
        self._hooks = Hooks(micro_batches=accumulate)
        taken = take_over(model, self.store, weights, hooks=self._hooks, room_nbytes=room)
        self.places = taken.places
        self.weights = dict(model.named_parameters(remove_duplicate=False))
        self._order = {name: k for k, name in enumerate(self.weights)}
        self.counts: dict[str, int] = {}
        self.loss_scale = LossScale(dynamic=precision == "fp16")
        buffers = buffers_to(model, self.device)
        self.ledger.device.charge("buffers", buffers)
        self.meter.begin()
        for tensor in [*(t for home in self.store.homes for t in home.tensors), *self.store.flats, *model.buffers()]:
            self.meter.ignore(tensor)
        self.updating = Updating(self.store, self.rules, self.meter, staged=precision != "fp32" or clip_norm is not None)
        self.store.own = self.meter.ignore
        self.undo = Undo(model, self.device)
        self.residents = Residents(self.store, self.meter, self._retire, self.interrupts.check)
        self._watched = Watched(self.meter, self.ledger.device)
        self.strays = Strays(self.residents)
        self._strays_again = StraysInBackward(self.residents)
        self.recompute = Recompute()
        watch_layers(model, self.residents, self.recompute)
        self.planning = Planning(self.store, self.recompute, recompute, rates, self.budget.plan_nbytes - buffers)
        self.planning.stage_nbytes, self.planning.passing = self.updating.stage_nbytes, self.updating.passing
        self.updating.saw = self.planning.saw_update
        self.exchanging: DenseExchange | SparseExchange = DenseExchange()
        if isinstance(exchange, Sparse):
            self.exchanging = SparseExchange(exchange, self.store, self.rules, across)
            self.planning.residuals, self.planning.sending_nbytes = self.exchanging.residuals, self.exchanging.sending_nbytes()
        self.closed = False
        self.broken: str | None = None  # why the weights are not those of any step
        self._backward = False
        self.landed: dict[str, tuple[int, Slot]] = {}
        self._part_landed: set[str] = set()  # of the micro-batch that runs
        self.trace: list[Moment] | None = None  # of the last forward and backward, if they were traced
        self._traffic = astuple(self.store.traffic)  # at the start of the last step
        for parameter in {id(parameter): parameter for parameter in self.weights.values()}.values():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(landing(weakref.ref(self)))  # type: ignore[no-untyped-call]
        self.stand_ins = StandIns(model, self.weights, taken, self._hooks, self.device)
        of_name = dict(model.named_parameters(remove_duplicate=False))
        self.optimizer = Handle(settings, [(first, [of_name[name] for name in names]) for first, names in groups])

    # The step.

    @in_one_piece
    def step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Train on this rank's whole batch; the mean loss, detached. Modules are in the modes that they are in. A step
        that fails before its update leaves everything as it was; one that fails in it leaves nothing to go on from."""
        called(self, "step")
        with explained(self):
            return self._step(args, kwargs)

    def _step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        start = time.perf_counter()
        self.check_usable()
        warn_of_eval(self.model, self.steps)
        self.rules.begin(self.steps, self.optimizer.now(self.steps))
        self.planning.judged = self.must_judge
        self.planning.call = [*self.calls.row, self.rules.digest(self.steps)]
        plan, loss = gradients(self, signature(args, kwargs), args, kwargs)
        self.finish()
        self.planning.learn(plan, self.trace, self.residents)
        self.seconds = time.perf_counter() - start
        self.host_seconds = self.updating.waited()
        return loss

    def finish(self) -> None:
        """Update with the gradients that are there."""
        try:
            self.exchanging.finish(self)
        except BaseException as error:
            self.broken = f"step {self.steps} failed in its update ({type(error).__name__}: {error})"
            if isinstance(error, MoveError):
                raise self.named_error(error) from error
            raise
        self.steps += 1
        self.optimizer.counted()

    def forward_backwards(self, plan: Planned, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        self._part_landed = set()
        if not self.pending:
            self.landed.clear()
            self.exchanging.begin(self)
        losses, count = [], 1 if self.accumulating else self.accumulate
        self._traffic = astuple(self.store.traffic)
        try:
            with running(self, args, kwargs, self._watched.step(plan)), no_caches(self.model):
                schedule = plan.choice.schedule if plan.choice else None
                self.residents.begin_step(self.steps, schedule, plan.expected, looking=self._watched.looking)
                for k, (part_args, part_kwargs) in enumerate(parts(args, kwargs, count)):
                    self.last_part = k == count - 1 and not self.accumulating
                    losses.append(self._forward_backward(part_args, part_kwargs))
                    self.residents.retire_rest()
                traced, moments = self.residents.end_step()
                self.trace = moments if self._watched.learn(plan, moments, traced=traced) else None
                if not self.landed:
                    raise RunError("no trained parameter got a gradient: the loss depends on none of them")
        except MoveError as error:
            raise self.named_error(error) from error
        return torch.stack(losses).mean()

    def _forward_backward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        self._part_landed = set()
        args, kwargs = to_device(args, kwargs, self.device, self.input_dtype)
        looking = self.strays if self.strays.found or self.residents.tracing else nullcontext()
        again = self._strays_again if self._strays_again.layers or self.residents.tracing else nullcontext()
        with self.residents.saving(), looking:  # saving in backward too: the model may run parts of itself again
            out = self.model(*args, **kwargs)
            loss = loss_of(self.loss(out) if self.loss is not None else out)
            del out
            check_loss(loss, self.model)
            value = loss.detach().clone()
            if self.loss_scale.value != 1:
                loss = loss * self.loss_scale.value
            if self.accumulate > 1:
                loss = loss / self.accumulate
            self.residents.say("backward")
            self._backward = True
            try:
                with again:
                    loss.backward()  # type: ignore[no-untyped-call]
            finally:
                self._backward = False
        return value

    def land(self, parameter: torch.Tensor) -> None:
        self.interrupts.check()
        layer, slot = self.places[id(parameter)]
        hooks = self._hooks.of(parameter)
        if hooks:
            self.residents.touch(layer)  # a hook may read the weight
            if not run_hooks(hooks, parameter, slot.name):
                return
        assert parameter.grad is not None
        check_landing(slot.name, parameter.grad, in_backward=self._backward, again=slot.name in self._part_landed)
        with self.residents.quietly():
            self.exchanging.land(self, layer, slot, parameter.grad, first=slot.name not in self.landed)
            parameter.grad = None
            self._part_landed.add(slot.name)
            self.residents.landed(layer, slot)

    def _retire(self, layer: int, slots: list[Slot]) -> None:
        """All of a layer's gradients of this micro-batch are there (or no more will come)."""
        landed = [(slot, slot.name not in self.landed) for slot in slots]
        self.landed.update({slot.name: (layer, slot) for slot in slots})  # first: whatever happens, they must be undone
        self.exchanging.retire(self, layer, landed)

    @property
    def must_judge(self) -> bool:
        """No update before all gradients were looked at."""
        return self.skip_nonfinite or self.loss_scale.dynamic or self.clip_norm is not None

    @property
    def input_dtype(self) -> torch.dtype | None:
        return self.store.dtype if self.cast_inputs else None

    def check_usable(self, *, reading: bool = False) -> None:
        """`reading`: for what a closed engine can do too."""
        if not reading:
            self.check_open()
        self.stand_ins.check_closed()
        self.updating.check()
        self.exchanging.check()
        if self.broken is not None:
            raise RunError(
                f"{self.broken}: some weights are new, some old, some gone; load the last checkpoint: engine.load(folder)"
            )

    def wait(self) -> None:
        """Until the updates that run beside the steps are done."""
        self.store.wait()

    # Parts.

    def in_order(self) -> list[tuple[int, Slot]]:
        """What landed, in the model's order: the order of sums must not depend on the order of arrival."""
        return sorted(self.landed.values(), key=lambda place: self._order[place[1].name])

    def named_error(self, error: MoveError) -> RunError:
        return RunError(f"rank {self.wire.rank}, step {self.steps}, {self.residents.place()}: {error}")

    def _over_budget(self, perhaps: bool) -> None:
        self.residents.make_room()
        if not perhaps and self.ledger.total_nbytes > self.meter.budget_nbytes:
            raise does_not_fit(self.steps, self.ledger, self.meter, self.model, self.planning.mode)
