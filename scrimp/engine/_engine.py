"""The engine: one training step as a readable sequence of phases.

step = split the batch
       for each part: forward through the layers, backward, gradients landing as they are made
       judge (finite? norm?)
       update what landed, layer by layer
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from scrimp.checkpoint import load, save
from scrimp.chunks._cuda_meter import CudaMeter
from scrimp.chunks._meter import CpuMeter
from scrimp.chunks._optim import AdamW, Optimizer, by_parameter
from scrimp.chunks._store import DTYPES, Store
from scrimp.chunks._table import ChunkTable, Slot
from scrimp.chunks._update import Updater
from scrimp.engine._forward import watch_layers
from scrimp.engine._memory import Memory, resolve
from scrimp.engine._resident import Residents
from scrimp.engine._take_over import DEFAULT_CHUNK, buffers_to, table_of, take_over
from scrimp.engine._world import join_world, share_buffers
from scrimp.errors import FitError, MoveError, RunError
from scrimp.layers import find_layers
from scrimp.ledger import Ledger, format_nbytes


class Engine:
    """Trains any eager module within a device budget. The model is taken over: its parameters live in the engine."""

    def __init__(
        self,
        model: nn.Module,
        *,
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
        self.recompute = recompute
        self.loss = loss
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        if self.device.type == "cuda" and self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.budget = resolve(memory or Memory(), self.device)
        self.ledger = Ledger(tier=str(self.device))
        self.steps = 0
        self.skipped = 0
        self.wire = join_world(self.device)
        table = table_of(model, find_layers(model), chunk_numel, self.wire.world)
        self._check_fit(table_nbytes=max((_layer_nbytes(table, k, precision) for k in range(len(table.layers))), default=0))
        self.store = Store(
            table,
            precision=precision,
            device=self.device,
            states=self.optimizer.states,
            accumulate=accumulate,
            ledger=self.ledger,
            wire=self.wire,
        )
        self._optimizers = by_parameter(self.optimizer, [s.name for layer in table.layers for s in layer.slots if s.trainable])
        self._places = take_over(model, self.store)
        self._counts: dict[str, int] = {}
        buffers = buffers_to(model, self.device)
        self.ledger.charge("buffers", buffers)
        self._updater = Updater(torch.device("cpu"))
        self._meter: CpuMeter | CudaMeter
        if self.device.type == "cuda":
            self._meter = CudaMeter(self.ledger, self.budget.device_nbytes, self.device)
        else:
            self._meter = CpuMeter(self.ledger, self.budget.device_nbytes, self._over_budget)
        self.residents = Residents(self.store, self._meter, self.budget.device_nbytes - buffers, self._retire)
        for tensor in [*self.store.arenas, *self.store.flats, self._updater.stage, *model.buffers()]:
            self._meter.ignore(tensor)
        watch_layers(model, self.residents, lambda: self._recomputing)
        self._recomputing = recompute == "all"
        self._landed: dict[str, tuple[int, Slot]] = {}
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._land)  # type: ignore[no-untyped-call]

    # The step.

    def step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Train on this rank's whole batch; the mean loss, detached."""
        if self.recompute == "auto" and self.steps == 0 and not self._recomputing:
            try:
                return self._step(args, kwargs)
            except FitError:
                self._recomputing = True
            # No weight has changed yet: try again with the layers recomputed, which needs the least. Not before the
            # except clause has ended: the error holds the frames, and they hold the activations that did not fit.
            self._abandon()
        return self._step(args, kwargs)

    def _step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        self._landed.clear()
        losses = []
        self.model.train()
        share_buffers(self.wire, self.model)
        try:
            with self._metered(args, kwargs):
                self.residents.begin_step(self.steps)
                for part_args, part_kwargs in _parts(args, kwargs, self.accumulate):
                    losses.append(self._forward_backward(part_args, part_kwargs))
                    self.residents.retire_rest()
                self.residents.end_step()
            finite = self._judge()
        except MoveError as error:
            where = f"rank {self.wire.rank}, step {self.steps}, {self.residents.place()}"
            raise RunError(f"{where}: {error}") from error
        if finite:
            self._update()
        else:
            self.skipped += 1
            for layer, slot in self._landed.values():
                self.store.restore(layer, slot)
        self.steps += 1
        return torch.stack(losses).mean()

    def _forward_backward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        self._part_landed: set[str] = set()
        args, kwargs = self._on_device(args, kwargs)
        with self.residents.saving():
            out = self.model(*args, **kwargs)
            loss = self._loss_of(out)
            del out
        value = loss.detach().clone()
        self.residents.say("backward")
        (loss / self.accumulate if self.accumulate > 1 else loss).backward()  # type: ignore[no-untyped-call]
        return value

    def _land(self, parameter: torch.Tensor) -> None:
        layer, slot = self._places[id(parameter)]
        if slot.name in self._part_landed:
            raise RunError(
                f"a second gradient for {slot.name} in one backward: use checkpoint(..., use_reentrant=False), "
                "and call backward once per step"
            )
        assert parameter.grad is not None
        self.residents.before_landing(layer)
        self.store.land(layer, slot, parameter.grad)
        parameter.grad = None
        self._part_landed.add(slot.name)
        self.residents.landed(layer, slot)

    def _retire(self, layer: int, slots: list[Slot]) -> None:
        """All of a layer's gradients of this micro-batch are there (or no more will come)."""
        self.store.retire(layer, [(slot, slot.name not in self._landed) for slot in slots])
        self._landed.update({slot.name: (layer, slot) for slot in slots})

    def _judge(self) -> bool:
        """Whether to update: finite gradients, if that was asked for; sets the scale that clips the norm."""
        self._scale: torch.Tensor | None = None
        if not self.skip_nonfinite and self.clip_norm is None:
            return True
        self._synchronize()
        norms = self._norms()
        if norms is None:
            return True
        total = torch.linalg.vector_norm(norms)
        if not bool(torch.isfinite(total)):
            bad = next(slot.name for (_, slot), norm in zip(self._in_order(), norms, strict=True) if not norm.isfinite())
            if self.skip_nonfinite:
                warnings.warn(f"step {self.steps}: gradient of {bad} is not finite; the update is skipped", stacklevel=3)
                return False
        self.norm = float(total)
        if self.clip_norm is not None:
            self._scale = torch.clamp(self.clip_norm / (total + 1e-6), max=1.0)
        return True

    def _norms(self) -> torch.Tensor | None:
        """The norm of each gradient that landed, over all ranks."""
        if not self._landed:
            return None
        rows = []
        for layer, slot in self._in_order():
            parts = [self._updater.norm(piece.gradient) for piece in self.store.pieces(layer, slot)]
            if self.wire.world > 1:
                parts = [sum((part * part for part in parts), start=torch.zeros(()))]
            rows.append(parts[0])
        stacked = torch.stack(rows)
        return stacked if self.wire.world == 1 else self.wire.sum(stacked).sqrt()

    def _update(self) -> None:
        self._synchronize()
        for layer, slot in self._in_order():
            count = self._counts[slot.name] = self._counts.get(slot.name, 0) + 1
            for piece in self.store.pieces(layer, slot):
                weight = None if self.store.own_master else piece.weight
                self._updater.apply(self._optimizers[slot.name], self.steps, count, piece, self._scale, weight)

    # Looking at it.

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Forward without gradients, through the same residency; the model is in eval mode."""
        self.model.eval()
        try:
            with self._metered(args, kwargs), torch.no_grad(), self.residents.aside():
                args, kwargs = self._on_device(args, kwargs)
                return self.model(*args, **kwargs)
        finally:
            self.model.train()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """All parameters in fp32 and all buffers, on the CPU."""
        return dict(self.iter_state())

    def iter_state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every parameter in fp32 by every name it has, and every buffer; every rank gets all of them, one at a time."""
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            layer, slot = self._places[id(parameter)]
            yield name, self._full(layer, slot)
        for name, buffer in self.model.named_buffers():
            yield name, buffer.detach().cpu().clone()

    def save(self, folder: str | Path) -> None:
        """Write a checkpoint: weights, masters, states, step and random state; complete or not there at all."""
        save(
            folder,
            self.store,
            optimizer=type(self.optimizer).__name__,
            steps=self.steps,
            skipped=self.skipped,
            counts=self._counts,
            rng=torch.get_rng_state(),
            buffers=dict(self.model.named_buffers()),
        )

    def load(self, folder: str | Path) -> None:
        """Go on from a checkpoint, whatever budget, chunk size and number of ranks it was written with."""
        manifest, rng, buffers = load(folder, self.store, optimizer=type(self.optimizer).__name__)
        self.steps, self.skipped = manifest.steps, manifest.skipped
        self._counts = {name: entry.count for name, entry in manifest.entries.items() if entry.count}
        for name, buffer in self.model.named_buffers():
            if name in buffers:
                buffer.copy_(buffers[name])
        if rng is not None:
            torch.set_rng_state(rng)
        self.residents.abandon()

    def close(self) -> None:
        """Give the device back: layers go, and the cap on the allocator is lifted. The host keeps the state."""
        self.residents.abandon()
        self._meter.close()

    def _full(self, layer: int, slot: Slot) -> torch.Tensor:
        full = torch.zeros(slot.numel)
        for piece in self.store.pieces(layer, slot):
            full[piece.inside] = (piece.master if slot.trainable else piece.weight).float()
        return self.wire.sum(full).view(slot.shape)

    # Parts.

    def _in_order(self) -> list[tuple[int, Slot]]:
        """What landed, in the table's order: the order of sums must not depend on the order of arrival."""
        return sorted(self._landed.values(), key=lambda place: (place[0], place[1].start))

    def _on_device(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Inputs on the device; floating-point ones in the precision of the weights they meet."""

        def move(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            return leaf.to(self.device, self.store.dtype if leaf.is_floating_point() else leaf.dtype)

        moved: tuple[Any, Any] = tree_map(move, (args, kwargs))
        return moved

    def _loss_of(self, out: Any) -> torch.Tensor:
        loss = self.loss(out) if self.loss is not None else out
        if isinstance(loss, dict):
            loss = loss.get("loss")
        elif not isinstance(loss, torch.Tensor):
            loss = getattr(loss, "loss", None)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise RunError(
                f"the model returned {type(out).__name__}, which is no scalar loss and has no `loss`; give Engine(loss=function)"
            )
        return loss.reshape(())

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
                + ("Use a smaller batch" if self._recomputing else "Use recompute='all' or a smaller batch")
                + ", more accumulate, or a larger Memory(device=...)"
            )

    def _abandon(self) -> None:
        """Undo a step that failed before the update: weights again where gradients stood."""
        gc.collect()  # graphs that failed half-way are cycles
        for parameter in self.model.parameters():
            parameter.grad = None
        self.residents.abandon()
        for layer, slot in self._landed.values():
            self.store.restore(layer, slot)
        self._landed.clear()
        self.ledger.reset_peak()

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _check_fit(self, table_nbytes: int) -> None:
        if table_nbytes > self.budget.device_nbytes:
            raise FitError(
                f"the largest layer has {format_nbytes(table_nbytes)} of weights, the device budget is "
                f"{format_nbytes(self.budget.device_nbytes)} ({self.budget.device_origin})"
            )


def _validate(precision: str, accumulate: int, recompute: str, clip_norm: float | None) -> None:
    if precision not in ("bf16", "fp32"):
        raise RunError(f"precision {precision!r} is not one of 'bf16', 'fp32'")
    if isinstance(accumulate, bool) or not isinstance(accumulate, int) or accumulate < 1:
        raise RunError(f"accumulate={accumulate!r}: it is the number of parts a batch is split into, 1 or more")
    if recompute not in ("auto", "none", "all"):
        raise RunError(f"recompute={recompute!r} is not one of 'auto', 'none', 'all'")
    if clip_norm is not None and not clip_norm > 0:
        raise RunError(f"clip_norm={clip_norm!r} must be more than 0")


def _layer_nbytes(table: ChunkTable, layer: int, precision: str) -> int:
    return sum(table.layers[other].numel for other in table.layers[layer].needs) * DTYPES[precision].itemsize


def _parts(args: Any, kwargs: Any, count: int) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """The batch in equal parts along dim 0 of every tensor."""
    if count == 1:
        yield args, kwargs
        return
    leaves, spec = tree_flatten((args, kwargs))
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and (leaf.dim() == 0 or leaf.shape[0] % count):
            raise RunError(f"a tensor of shape {tuple(leaf.shape)} cannot be split into accumulate={count} equal parts on dim 0")
    for k in range(count):
        part = [leaf.chunk(count)[k] if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        part_args, part_kwargs = tree_unflatten(part, spec)
        yield part_args, part_kwargs
