"""Sparse gradient exchange, top-k with error feedback: every rank has its own optimizer states and residuals.

As backward produces the gradients of a layer, each goes into the optimizer's momentum. The resulting update is added to the
residual. The largest entries of the residual are packed and sent to the other ranks. If the layer is placed on the device, the
gradient is consumed where autograd made it and needs no buffer. Otherwise it is first copied to its tier. When packets of all
ranks have arrived for a layer, their mean is subtracted from the master weights and the weights are rewritten. This happens at
the latest when the next forward fetches the layer, and never while a backward may still need the old weights.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from scrimp._warnings import warn
from scrimp.checkpoint import Named
from scrimp.chunks import DEVICE, DTYPES, SGD, AdamW, Opened, Piece, Rules, Slot, Store, Wire, Worker, rate
from scrimp.engine.gradients.apply import Arrivals
from scrimp.engine.gradients.checkpoint import load, partners, tensors
from scrimp.engine.gradients.local_shards import Share, shares_of
from scrimp.engine.gradients.replica_check import compare_replicas
from scrimp.engine.gradients.residuals import Residuals
from scrimp.engine.setup.process_groups import leave
from scrimp.engine.update.update import restore_all
from scrimp.exchange import (
    Adaptive,
    BucketedExchange,
    ErrorFeedback,
    Member,
    Momentum,
    Pace,
    Rule,
    Sparse,
    finite,
    largest_piece,
    measure_pace,
    plan_buckets,
    select_topk,
    sparse_pays,
)

if TYPE_CHECKING:
    from scrimp.engine._training import Training

CPU = torch.device("cpu")
LOOKING_NBYTES = 24  # scratch bytes per element of a piece: residual, magnitudes, and what coding or sorting takes


class SparseExchange:
    """Implements `Exchange` with top-k packets and error feedback."""

    def __init__(self, settings: Sparse, store: Store, rules: Rules, wire: Wire) -> None:
        self.settings, self.store, self.rules = settings, store, rules
        self._trained = shares_of(store)
        self._of_slot = {share.slot.name: share for shares in self._trained for share in shares}  # where a slot has one share
        self._here = {share.slot.name for shares in self._trained for share in shares}  # other ranks of the node have the rest
        self._wire = wire
        self._group = store.wire.rank  # the number of the group of ranks that `wire` is
        itemsize, density = DTYPES[settings.values].itemsize, settings.density
        self.pace = self._measured_pace() if settings.choose and density < 1 else None
        self._summed = [
            self.pace is not None
            and sum(share.numel for share in shares) >= settings.small
            and not sparse_pays(sum(share.numel for share in shares), wire.world, density, itemsize, self.pace)
            for shares in self._trained
        ]
        if store.micro_batches > 1 and (any(self._summed) or density == 1):
            # Micro-batches of a dense parameter must be accumulated in a buffer that the plan knows of.
            store.consumed = store.consumed and any(placement.tier == DEVICE for placement in store.placements)
        self.residuals = Residuals(store, settings, wire.rank, self._with_residual())
        store.moved, store.residual_bytes = self.residuals.settle, self.residuals.residual_bytes
        self._arrivals = Arrivals(store, rules, raw=self._raw)
        self._messages = 0
        separate = store.device.type == "cuda" and wire.world > 1
        self._stream = torch.cuda.Stream(store.device) if separate else None  # type: ignore[no-untyped-call]
        self._start_threads()
        self._sent: set[int] = set()  # layers whose gradients were consumed
        self._small: dict[int, list[tuple[Share, torch.Tensor]]] = {}  # small gradients, until their layer is complete
        self._sums: dict[str, torch.Tensor] = {}  # of micro-batches, for parameters without a residual
        self._sound: dict[str, torch.Tensor | bool] = {}  # whether all gradients of a parameter were finite in this step

    def _start_threads(self) -> None:
        self._comm = Worker("the exchange of gradients")
        self._close = weakref.finalize(self, _end, self._comm, self._wire)  # at exit too: the thread must not outlive torch
        self._round: BucketedExchange | None = None

    def _measured_pace(self) -> Pace:
        return measure_pace(self._wire, self.store.device, self.settings.density)

    # In the order of a step.

    def meet(self, engine: Training) -> None:
        """Every `check_every` steps compare checksums of the ranks' weights, once, however often the step is retried."""
        if engine.steps and engine.steps % self.settings.check_every == 0:
            compare_replicas(engine, self.store, self._wire)

    def check(self) -> None:
        """Raise an error of the communication thread, if there was one."""
        self._comm.check()

    def begin(self, engine: Training) -> None:
        density = self.settings.density_at(engine.steps)
        plan = plan_buckets((*self._members(),), density, DTYPES[self.settings.values], self.settings.small)
        self._round = BucketedExchange(engine.steps, plan, self._wire, self._comm, self._messages, self._stream)
        self._sent, self._sums, self._sound, self._small = set(), {}, {}, {}

    @property
    def started(self) -> bool:
        """Some residual has changed, so the step cannot be undone."""
        return bool(self._sent)

    def receive(self, engine: Training, layer: int, slot: Slot, gradient: torch.Tensor, *, first: bool) -> None:
        engine.residents.before_receiving(layer)
        if not self._at_once(layer):
            self.store.receive(layer, slot, gradient, first=first)
        else:
            self._consume(engine, layer, slot, gradient, first=first)

    def _consume(self, engine: Training, layer: int, slot: Slot, gradient: torch.Tensor, *, first: bool) -> None:
        share = self._of_slot[slot.name]
        if engine.micro_batches == 1 and share.numel < self.settings.small:
            self._small.setdefault(layer, []).append((share, gradient))  # batched: one call each would cost as much as all
            return
        self._take_all(engine, layer, [(share, gradient)], first=first)

    def retire(self, engine: Training, layer: int, arrived: list[tuple[Slot, bool]]) -> None:
        """All of a layer's gradients of this micro-batch have arrived, each with whether it is the first of its slot."""
        self.store.retire(layer, arrived)
        self._retired(engine, layer)

    def _retired(self, engine: Training, layer: int) -> None:
        if not engine.current.last_part:
            return
        if self._at_once(layer):
            assert self._round is not None
            if layer in self._small:
                self._take_all(engine, layer, self._small.pop(layer), first=True)
            self._round.done(layer)
        elif engine.residents.following:  # a tracing step may still have to be undone
            self._send(engine, layer)

    def finish(self, engine: Training) -> None:
        """After the last backward: send the remaining layers, then apply what arrived, now or when a layer is fetched."""
        assert self._round is not None
        going = self._round
        self._messages += len(going.buckets)
        arrived = {layer for layer, _ in engine.current.arrived.values()}
        for layer, shares in enumerate(self._trained):
            if shares and layer not in arrived:
                going.done(layer)
            elif layer in arrived and layer not in self._sent:
                self._send(engine, layer)
            elif layer in arrived and self._at_once(layer):
                self._complete(engine, going, layer)
        others = [slot for _, slot in engine.in_order() if slot.name not in self._here]  # their counts are kept here too
        scale = 1.0
        if engine.must_check:
            going.wait()
            bad = self._bad(engine, going)
            if bad is not None and engine.skip_nonfinite:
                self._skip(engine, going, bad)
                return
            engine.norm = self._arrivals.norm(going, (share for shares in self._trained for share in shares), engine.steps)
            if engine.clip_norm is not None:
                scale = min(1.0, engine.clip_norm / (engine.norm + 1e-6))
        engine.updating.numbers(others, engine.counts)
        for layer, shares in enumerate(self._trained):
            if shares:
                self._arrivals.apply(engine, going, layer, shares, scale)

    def _complete(self, engine: Training, going: BucketedExchange, layer: int) -> None:
        """In a layer whose gradients were consumed on arrival: send parameters that the last micro-batch did not reach."""
        data = self.store.direct(layer)
        for share in self._trained[layer]:
            if share.slot.name not in engine.current.arrived or share.name in going.present or share.name in going.flagged:
                continue
            none = torch.zeros_like(share.piece(data).weight)
            self._take(engine, layer, share, none, first=False, last=True)
        going.done(layer)

    def give_up(self) -> None:
        """Abandon the step."""
        if self._round is not None:
            self._round.give_up()

    def saved(self, engine: Training) -> Iterable[Named]:
        """Tensors that a checkpoint needs in addition to those of the store: residuals, and states of all but one rank."""
        self.store.wait()
        self.store.copy_streams.settle()  # the device writes residuals on the host
        return tensors(self, self._wire.rank, self._group)

    def load(self, engine: Training, files: list[Any]) -> None:
        """Restore from the checkpoint files of all ranks."""
        self.store.copy_streams.settle()
        self._close.detach()
        self._comm.close()  # and discard its error, if it had one
        self._start_threads()
        likely = files[self.store.wire.rank :: self.store.wire.world]
        load(self, partners(self, files) or likely, self._wire.rank, self._wire.world)

    def with_residual(self) -> Iterator[tuple[int, Share]]:
        """Layers and shares that have a residual."""
        for layer, shares in enumerate(self.residuals.shares):
            for share in shares:
                yield layer, share

    def close(self) -> None:
        self._close()

    def sending_nbytes(self) -> int:
        return sending_nbytes(self.settings, (*self._members(),), self._wire.world, self.store.device)

    def _selected_numel(self, numel: int) -> int:
        """Elements that the selection handles at a time."""
        return largest_piece(numel, self.store.device)

    # Parts.

    def _members(self) -> Iterator[Member]:
        for layer in reversed(range(len(self._trained))):
            if self._trained[layer]:
                device = self.store.device if self.store.placements[layer].tier == DEVICE else CPU
                sizes = tuple((share.name, share.numel) for share in self._trained[layer])
                yield Member(layer=layer, sizes=sizes, device=device, summed=self._summed[layer])

    def _with_residual(self) -> list[list[Share]]:
        """For every layer the shares that have a residual."""
        small, few = self.settings.small, self.settings.density < 1
        return [
            [share for share in shares if share.numel >= small and few and not summed]
            for shares, summed in zip(self._trained, self._summed, strict=True)
        ]

    def _at_once(self, layer: int) -> bool:
        """Gradients are consumed on arrival: their layer is placed on the device, and no accumulation must precede."""
        return self.store.placements[layer].tier == DEVICE and self.store.consumed

    def _send(self, engine: Training, layer: int) -> None:
        """Send a layer whose gradients are on its tier, or being copied there."""
        going, shares = self._round, [share for share in self._trained[layer] if share.slot.name in engine.current.arrived]
        assert going is not None
        self._sent.add(layer)
        if not self._trained[layer]:
            return  # other ranks of this node hold it
        going.open(layer)
        data, come = self.store.direct(layer), self.store.take_coming_down(layer)
        ahead = list(dict.fromkeys(share.slot for share in shares if self._counts_ahead(going, share)))
        counts = dict(zip(ahead, engine.updating.numbers(ahead, engine.counts), strict=True))
        step = engine.steps

        def job() -> None:
            try:
                for share in shares:
                    gradient = share.piece(data).gradient
                    self._put(going, step, data, share, gradient, counts.get(share.slot, 1), first=True, last=True)
                going.done(layer)
            except BaseException as error:  # otherwise the other ranks would wait forever
                self._comm.fail(error)
                raise

        if self.store.placements[layer].tier == DEVICE:
            job()
        else:
            self.store.gates[layer] = engine.updating.worker.submit(layer, job, come)

    def _take_all(self, engine: Training, layer: int, arrived: list[tuple[Share, torch.Tensor]], *, first: bool) -> None:
        assert self._round is not None
        self._round.open(layer)

        def take() -> None:
            self._sent.add(layer)
            for share, gradient in arrived:
                self._take(engine, layer, share, gradient.reshape(-1), first=first, last=engine.current.last_part)

        engine.meter.aside(take, LOOKING_NBYTES * self._selected_numel(max(share.numel for share, _ in arrived)))

    def _take(self, engine: Training, layer: int, share: Share, gradient: torch.Tensor, *, first: bool, last: bool) -> None:
        going = self._round
        assert going is not None
        count = 1
        if last and self._counts_ahead(going, share):
            (count,) = engine.updating.numbers([share.slot], engine.counts)
        self._put(going, engine.steps, self.store.direct(layer), share, gradient, count, first=first, last=last)

    def _counts_ahead(self, going: BucketedExchange, share: Share) -> bool:
        """The optimizer runs before the exchange, so its step count is raised before packets arrive."""
        return not going.part(share.name).whole and not self._raw

    def _put(
        self,
        going: BucketedExchange,
        step: int,
        data: Opened,
        share: Share,
        gradient: torch.Tensor,
        count: int,
        *,
        first: bool,
        last: bool,
    ) -> None:
        """Add a gradient to the residual; with the last micro-batch, also write the selected entries into the row to send."""
        part, dtype = going.part(share.name), going.dtype(share.name)
        if first and last and part.how is None and going.put_small(share.name, gradient) is not None:
            return
        sound = self._is_sound(share.name, gradient, first=first)
        flag = None if isinstance(sound, bool) else sound
        if sound is False:
            going.checked(share.name, torch.tensor(False))
            return
        if part.whole:
            if not first:
                gradient = self._sums[share.name].add_(gradient)
            elif not last:
                self._sums[share.name] = gradient.float()
            if last:
                positions = None if part.how is None else select_topk(gradient, part.how)
                going.put(share.name, positions, gradient if flag is None else gradient.to(dtype).masked_fill(~flag, 0))
                self._sums.pop(share.name, None)
        else:
            piece, optimizer = share.piece(data), self.rules.of(share.slot.name, step)
            kept = self._kept(share, piece, step)
            lr = 1.0 if self._raw else float(rate(optimizer, step))
            if first and optimizer.weight_decay and not self._raw and not isinstance(optimizer, AdamW):
                gradient = gradient.float().add(piece.master, alpha=optimizer.weight_decay)
            if last:
                assert part.how is not None
                packet = going.packet(share.name)
                kept.send_into(packet, gradient, part.how, dtype, lr, count, first=first, sound=flag)
            else:
                kept.add(gradient, lr, first=first, sound=flag)
        if last and flag is not None:
            going.checked(share.name, flag)

    def _is_sound(self, name: str, gradient: torch.Tensor, *, first: bool) -> torch.Tensor | bool:
        """Whether this gradient and those of earlier micro-batches are finite. On a GPU the result is a flag on the device,
        because reading it would make the host wait."""
        sound: torch.Tensor | bool
        if gradient.is_cpu:
            sound = finite(gradient)
        else:
            some = gradient if gradient.numel() else gradient.new_zeros(1)  # an empty tensor has no maximum
            sound = torch.linalg.vector_norm(some, torch.inf) < torch.inf
        self._sound[name] = sound if first else sound & self._sound[name]
        return self._sound[name]

    def _kept(self, share: Share, piece: Piece, step: int) -> ErrorFeedback:
        optimizer, rest = self.rules.of(share.slot.name, step), self.residuals.of(share.name)
        rule: Rule = Momentum(momentum=0.0)
        if isinstance(optimizer, AdamW) and not self._raw:
            rule = Adaptive(betas=optimizer.betas, eps=optimizer.eps)
        elif isinstance(optimizer, SGD) and not self._raw:
            rule = Momentum(momentum=optimizer.momentum)
        states = [] if self._raw else piece.states
        return ErrorFeedback(rule=rule, states=states, rest=rest, numel=share.numel, masking=self.settings.masking)

    @property
    def _raw(self) -> bool:
        """Ranks exchange gradients, and the optimizer runs after the exchange."""
        return self.settings.of == "gradient"

    def _bad(self, engine: Training, going: BucketedExchange) -> str | None:
        """Names a parameter whose gradient is not finite, and its rank; the same text on all ranks."""
        found, gpus = going.bad(), self.store.wire.world
        names = [slot.name for space in self.store.table.layers for slot in space.slots]
        mine = [0, 0] if found is None else [1 + names.index(found[0].rpartition("@")[0] if gpus > 1 else found[0]), found[1]]
        if gpus > 1:  # this rank has not seen what the others of its node exchanged
            rows = self.store.wire.every(torch.tensor(mine))
            mine = rows[rows[:, 0].argmax()].tolist()
        where = f"rank {mine[1]}" if gpus == 1 else f"node {mine[1]}"
        return f"gradient of {names[mine[0] - 1]} is not finite on {where}" if mine[0] else None

    def _skip(self, engine: Training, going: BucketedExchange, bad: str) -> None:
        """Skip the update on all ranks; the entries that were sent go back into the residuals."""
        warn(f"step {engine.steps}: {bad}; the update is skipped")
        engine.skipped += 1
        for layer, shares in enumerate(self._trained):
            data = self.store.direct(layer)
            for share in shares:
                if share.name in going.present and not going.part(share.name).whole:
                    self._kept(share, share.piece(data), engine.steps).give_back(*going.mine(share.name))
        restore_all(self.store, engine.current.arrived.values())


def sending_nbytes(settings: Sparse, members: tuple[Member, ...], world: int, device: torch.device) -> int:
    """Peak device bytes of sending if all layers are placed there: rows sent and received, and the scratch of selecting
    entries."""
    plan = plan_buckets(members, settings.density_at(0), DTYPES[settings.values], settings.small)
    rows = sum(bucket.nbytes for _, _, bucket in plan) * (1 if world == 1 else 1 + world)
    largest = max((numel for member in members for _, numel in member.sizes), default=0)
    return rows + LOOKING_NBYTES * largest_piece(largest, device)


def _end(comm: Worker, wire: Wire) -> None:
    """Ends the exchange's thread, and its process group."""
    comm.close()
    leave(wire)
