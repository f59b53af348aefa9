"""Gradients exchanged by few entries of each: every rank has all of the model, and its own moments and residuals.

A step, layer by layer, as gradients come: into the momentum, with that into the residual; the largest of it into a packet; on
to the other ranks. A gradient whose layer is at home on the device is used up where autograd made it, and has no buffer; others
go home first, as ever. When a layer's packets have come from all ranks they are taken from its masters, and its weights are
written anew: at the latest when its next forward asks for it, and never while a backward may still need the old ones.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from scrimp.checkpoint import Named
from scrimp.chunks._home import DEVICE, Piece
from scrimp.chunks._optim import AdamW, Optimizer, rate
from scrimp.chunks._store import DTYPES, Store
from scrimp.chunks._table import Slot
from scrimp.chunks._update import Updater
from scrimp.chunks._wire import Wire
from scrimp.chunks._worker import Gate, Worker
from scrimp.engine._residuals import Residuals
from scrimp.engine._sparse_state import load, tensors
from scrimp.engine._updating import restore_all
from scrimp.errors import RunError
from scrimp.exchange._arrived import mean_pieces, subtract
from scrimp.exchange._bucket import NOT_FINITE, PRESENT
from scrimp.exchange._kept import Adaptive, Kept, Momentum
from scrimp.exchange._round import Member, Round, plan_buckets
from scrimp.exchange._select import select
from scrimp.exchange._settings import Sparse

if TYPE_CHECKING:
    from scrimp.engine._engine import Engine

CPU = torch.device("cpu")


class SparseExchange:
    def __init__(self, settings: Sparse, store: Store, optimizers: dict[str, Optimizer], wire: Wire) -> None:
        self.settings, self.store, self.optimizers = settings, store, optimizers
        self._trained = [[slot for slot in space.slots if slot.trainable] for space in store.table.layers]
        self.residuals = Residuals(store, settings, wire.rank, self._trained)
        store.moved, store.beside_nbytes = self.residuals.settle, self.residuals.beside_nbytes
        self._wire = wire
        self._comm = Worker("the exchange of gradients")
        self._close = weakref.finalize(self, self._comm.close)  # at exit too: the thread must not outlive torch
        self._messages = 0
        self._round: Round | None = None
        self._sent: set[int] = set()  # layers whose gradients were used up
        self._sums: dict[str, torch.Tensor] = {}  # of micro-batches, where nothing is kept back

    # In the order of a step.

    def begin(self, engine: Engine) -> None:
        self._comm.check()
        if engine.steps and engine.steps % self.settings.check_every == 0:
            self.compare(engine)
        density = self.settings.density_at(engine.steps)
        plan = plan_buckets(self._members(), density, DTYPES[self.settings.values], self.settings.small)
        self._round = Round(engine.steps, plan, self._wire, self._comm, self._messages)
        self._sent, self._sums = set(), {}

    @property
    def started(self) -> bool:
        """Something was changed that cannot be undone."""
        return bool(self._sent)

    def land(self, engine: Engine, layer: int, slot: Slot, gradient: torch.Tensor, *, first: bool) -> None:
        engine.residents.before_landing(layer)
        if not self._at_once(layer):
            self.store.land(layer, slot, gradient, first=first)
            return
        self._sent.add(layer)
        assert self._round is not None
        self._round.open(layer)
        (piece,) = self.store.direct(layer).pieces(slot)
        self._take(engine, slot, replace(piece, gradient=gradient.reshape(-1)), first=first, last=engine.last_part)

    def retire(self, engine: Engine, layer: int, landed: list[tuple[Slot, bool]]) -> None:
        """All of a layer's gradients of this micro-batch are there, each with whether it is the first (or no more will come)."""
        self.store.retire(layer, landed)
        if not engine.last_part:
            return
        if self._at_once(layer):
            assert self._round is not None
            self._round.done(layer)
        elif engine.residents.following:  # else the step may have to be undone
            self._send(engine, layer)

    def finish(self, engine: Engine) -> None:
        """After the last backward: what is left is sent, and what came is applied, now or when it is asked for."""
        assert self._round is not None
        going = self._round
        self._messages += len(going.buckets)
        by_layer: dict[int, list[Slot]] = {}
        for layer, slot in engine.in_order():
            by_layer.setdefault(layer, []).append(slot)
        for layer, slots in enumerate(self._trained):
            if slots and layer not in by_layer:
                going.done(layer)
            elif slots and layer not in self._sent:
                self._send(engine, layer)
        scale = 1.0
        if engine.must_judge:
            going.wait()
            bad = going.bad()
            if bad is not None and engine.skip_nonfinite:
                self._skip(engine, going, *bad)
                return
            engine.norm = self._norm(going, engine.steps)
            if engine.clip_norm is not None:
                scale = min(1.0, engine.clip_norm / (engine.norm + 1e-6))
        for layer, slots in enumerate(self._trained):
            if slots:
                self._apply_later(engine, going, layer, slots, scale)

    def give_up(self) -> None:
        """The step is not made."""
        if self._round is not None:
            self._round.give_up()

    def saved(self, engine: Engine) -> Iterable[Named]:
        """What a checkpoint must have besides the store."""
        self.store.wait()
        return tensors(self, engine.wire.rank)

    def load(self, engine: Engine, files: list[Any]) -> None:
        """From the files of all ranks."""
        load(self, files, engine.wire.rank, engine.wire.world)

    def kept_back(self) -> Iterator[tuple[int, Slot]]:
        """Layers and slots that have a residual."""
        for layer, slots in enumerate(self.residuals.slots):
            for slot in slots:
                yield layer, slot

    def close(self) -> None:
        self._close()

    # Parts.

    def _members(self) -> Iterator[Member]:
        for layer in reversed(range(len(self._trained))):
            if self._trained[layer]:
                device = self.store.device if self.store.homes[layer].place == DEVICE else CPU
                sizes = tuple((slot.name, slot.numel) for slot in self._trained[layer])
                yield Member(layer=layer, sizes=sizes, device=device)

    def _at_once(self, layer: int) -> bool:
        """Gradients are used up as they come: their layer is at home on the device, and nobody has to add them up first."""
        return self.store.homes[layer].place == DEVICE and self.store.consumed

    def _send(self, engine: Engine, layer: int) -> None:
        """A layer whose gradients are at home, or on their way."""
        going, slots = self._round, [slot for slot in self._trained[layer] if slot.name in engine.landed]
        assert going is not None
        self._sent.add(layer)
        going.open(layer)
        data, come = self.store.direct(layer), self.store.take_coming_home(layer)
        numbers = engine.updating.numbers([slot for slot in slots if not going.part(slot.name).whole], engine.counts)
        counts = dict(zip([slot.name for slot in slots if not going.part(slot.name).whole], numbers, strict=True))
        step = engine.steps

        def job() -> None:
            try:
                for slot in slots:
                    (piece,) = data.pieces(slot)
                    self._put(going, step, slot, piece, counts.get(slot.name, 1), first=True, last=True)
                going.done(layer)
            except BaseException as error:  # or others would wait for what never comes
                self._comm.fail(error)
                raise

        if self.store.homes[layer].place == DEVICE:
            job()
        else:
            self.store.gates[layer] = engine.updating.worker.submit(layer, job, come)

    def _take(self, engine: Engine, slot: Slot, piece: Piece, *, first: bool, last: bool) -> None:
        going = self._round
        assert going is not None
        count = 1
        if last and not going.part(slot.name).whole:
            (count,) = engine.updating.numbers([slot], engine.counts)
        self._put(going, engine.steps, slot, piece, count, first=first, last=last)

    def _put(self, going: Round, step: int, slot: Slot, piece: Piece, count: int, *, first: bool, last: bool) -> None:
        """A gradient into what is kept, and, with the last micro-batch, what travels of that into the row."""
        part, gradient, dtype = going.part(slot.name), piece.gradient, going.dtype(slot.name)
        sound = torch.linalg.vector_norm(gradient, torch.inf).isfinite() if gradient.numel() else torch.ones(()).bool()
        if gradient.device == CPU and not bool(sound):  # elsewhere the host would have to wait to know
            going.flag(slot.name, NOT_FINITE)
            return
        if part.whole:
            if not first:
                gradient = self._sums[slot.name].add_(gradient)
            elif not last:
                self._sums[slot.name] = gradient.float()
            if last:
                positions = None if part.how is None else select(gradient, part.how)
                going.put(slot.name, positions, torch.where(sound, gradient.to(dtype), 0))
                self._sums.pop(slot.name, None)
        else:
            kept, optimizer = self._kept(slot, piece), self.optimizers[slot.name]
            lr = float(rate(optimizer, step))
            if first and optimizer.weight_decay and not isinstance(optimizer, AdamW):
                gradient = gradient.float().add(piece.master, alpha=optimizer.weight_decay)
            flag = None if gradient.device == CPU else sound
            if last:
                assert part.how is not None
                going.put(slot.name, *kept.add_and_send(gradient, part.how, dtype, lr, count, first=first, sound=flag))
            else:
                kept.add(gradient, lr, first=first, sound=flag)
        if last and gradient.device != CPU:
            going.flag(slot.name, torch.where(sound, PRESENT, NOT_FINITE))

    def _kept(self, slot: Slot, piece: Piece) -> Kept:
        optimizer, rest = self.optimizers[slot.name], self.residuals.of(slot.name)
        if isinstance(optimizer, AdamW):
            rule: Any = Adaptive(betas=optimizer.betas, eps=optimizer.eps)
        else:
            rule = Momentum(momentum=optimizer.momentum)
        return Kept(rule=rule, states=piece.states, rest=rest, numel=slot.numel, masking=self.settings.masking)

    def _skip(self, engine: Engine, going: Round, name: str, rank: int) -> None:
        """Nobody updates anything; what was sent waits again."""
        words = f"step {engine.steps}: gradient of {name} is not finite on rank {rank}; the update is skipped"
        warnings.warn(words, stacklevel=4)
        engine.skipped += 1
        for layer, slots in enumerate(self._trained):
            data = self.store.direct(layer)
            for slot in slots:
                if slot.name in going.present and not going.part(slot.name).whole:
                    (piece,) = data.pieces(slot)
                    self._kept(slot, piece).give_back(*going.mine(slot.name))
        restore_all(self.store, engine.landed.values())

    def _norm(self, going: Round, step: int) -> float:
        """Of what came, as gradients: what was kept back has its learning rate with it."""
        total = torch.zeros((), dtype=torch.float64)
        for slots in self._trained:
            for slot in slots:
                rows, bucket, part = going.rows(slot.name)
                lr = 1.0 if part.whole else float(rate(self.optimizers[slot.name], step))
                for _, mean in mean_pieces(rows, bucket, part) if lr else ():
                    norm = torch.linalg.vector_norm(mean, dtype=torch.float64).cpu() / lr
                    total += norm * norm
        return float(total.sqrt())

    # What came.

    def _apply_later(self, engine: Engine, going: Round, layer: int, slots: list[Slot], scale: float) -> None:
        store, step = self.store, engine.steps
        on_device = store.homes[layer].place == DEVICE
        updater = engine.updating.updater(on_device=on_device)
        counts = engine.counts

        def apply() -> None:
            data = store.direct(layer)
            for slot in slots:
                (piece,) = data.pieces(slot)
                self._apply(going, updater, counts, step, slot, piece, scale, own_master=data.own_master, stood=not on_device)
            if on_device:
                store.settled(layer)

        if on_device:
            store.gates[layer] = Pending(going.gate(layer), apply)  # type: ignore[assignment]
        else:
            store.gates[layer] = engine.updating.worker.submit(layer, apply, [going.gate(layer)])

    def _apply(
        self, going: Round, updater: Updater, counts: dict[str, int], step: int, slot: Slot, piece: Piece, scale: float, *,
        own_master: bool, stood: bool,
    ) -> None:  # fmt: skip
        """`stood`: a gradient stands where the weight stood, so that all of it is written anew."""
        rows, bucket, part = going.rows(slot.name)
        optimizer = self.optimizers[slot.name]
        if part.whole:
            if going.present_anywhere(slot.name):
                counts[slot.name] = count = counts.get(slot.name, 0) + 1
                for span, mean in mean_pieces(rows, bucket, part):
                    states = [state[span] for state in piece.states]
                    here = Piece(
                        inside=span,
                        weight=piece.weight[span],
                        gradient=mean.mul_(scale),
                        master=piece.master[span],
                        states=states,
                    )
                    updater.apply(optimizer, step, count, here, None, own_master=own_master)
                return
        else:
            decay = float(rate(optimizer, step)) * optimizer.weight_decay if isinstance(optimizer, AdamW) else 0.0
            if decay:
                piece.master.mul_(1 - decay)
            changed = subtract(piece.master, rows, bucket, part, scale)
            if own_master:
                return
            if not decay and not stood:
                for positions in changed:
                    piece.weight[positions] = piece.master[positions].to(piece.weight.dtype)
                return
        if not own_master:
            piece.weight.copy_(piece.master)

    # Looking after it.

    def compare(self, engine: Engine) -> None:
        """All ranks have the same weights, or the run stops here."""
        if self._wire.world == 1:
            return
        self.store.wait()
        sums = []
        for layer in range(len(self._trained)):
            master = self.store.direct(layer).master
            sums.append(int(torch.sum(master.view(torch.int32), dtype=torch.int64)))
        every = engine.wire.every(torch.tensor(sums))
        for layer, column in enumerate(every.unbind(1)):
            if not bool((column == column[0]).all()):
                path = self.store.table.layers[layer].path
                raise RunError(
                    f"step {engine.steps}: the ranks' weights of layer '{path}' are no longer the same (checksums "
                    f"{column.tolist()}); load the last checkpoint"
                )


class Pending:
    """A gate for what is done by whoever asks for it: what came is applied in the order of the device's own work."""

    def __init__(self, gate: Gate, apply: Any) -> None:
        self._gate, self._apply = gate, apply

    open = False  # until it was waited for, and then nobody has it any more

    def wait(self) -> None:
        self._gate.wait()
        self._apply()

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        self.wait()
