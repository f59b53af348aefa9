"""Applies received gradient packets to the master weights, on the host worker or lazily when the layer is next fetched."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from scrimp.chunks import DEVICE, AdamW, Gate, Piece, Rules, Store, Updater, rate
from scrimp.engine.gradients.local_shards import Share
from scrimp.errors import RunError
from scrimp.exchange import BucketedExchange, largest_piece, mean_pieces, subtract_mean

if TYPE_CHECKING:
    from scrimp.engine._training import Training


class Arrivals:
    """Applies what all ranks sent to master weights and weights. `raw`: ranks sent gradients, so the optimizer runs here."""

    def __init__(self, store: Store, rules: Rules, *, raw: bool) -> None:
        self.store, self.rules, self._raw = store, rules, raw

    def norm(self, came: BucketedExchange, shares: Iterable[Share], step: int) -> float:
        """Global gradient norm of all received packets. Residuals contain the learning rate, so it is divided out."""
        total, tiling = torch.zeros((), dtype=torch.float64), self.store.tiling
        for share in shares:
            if tiling is not None and not tiling.counts(share.slot.name):
                continue  # another rank counts it
            rows, bucket, part = came.rows(share.name)
            lr = 1.0 if part.whole or self._raw else float(rate(self.rules.of(share.slot.name, step), step))
            for _, mean in mean_pieces(rows, bucket, part) if lr else ():
                norm = torch.linalg.vector_norm(mean, dtype=torch.float64).cpu() / lr
                total += norm * norm
        wire = self.store.wire if tiling is None else self.store.ranks  # the ranks that shard model data
        return float(wire.sum(total.view(1)).sqrt())

    def apply(self, engine: Training, came: BucketedExchange, layer: int, shares: list[Share], scale: float) -> None:
        """Apply a layer's packets once all have arrived, or when the layer is fetched; `scale` is the clipping factor."""
        store, step, counts = self.store, engine.steps, engine.counts
        on_device = store.placements[layer].tier == DEVICE
        updater = engine.updating.updater(on_device=on_device)
        stood = not (on_device and store.consumed)  # the gradient overwrote the weight, in the same buffer

        def job() -> None:
            data = store.direct(layer)
            whole = {share.name for share in shares if self._raw or came.part(share.name).whole}
            there = {share.slot.name for share in shares if share.name in whole and came.present_anywhere(share.name)}
            ahead = {share.slot.name for share in shares if share.name not in whole}  # their count was raised when sent
            for name in sorted(there - ahead):
                counts[name] = counts.get(name, 0) + 1
            for share in shares:
                piece = share.piece(data)
                if share.name not in whole:
                    self._subtract(came, step, share, piece, scale, own_master=data.own_master, stood=stood)
                elif share.slot.name in there:
                    self._update(came, updater, counts[share.slot.name], step, share, piece, scale, own_master=data.own_master)
                elif stood and not data.own_master:  # no rank has a gradient, so restore the weight
                    piece.weight.copy_(piece.master)
            if on_device:
                store.settled(layer)

        if on_device:
            store.at_rest(layer)  # apply packets of an earlier step first, if the layer was not fetched since
            room = partial(engine.meter.aside, nbytes=max(self._nbytes(came, share) for share in shares))
            store.gates[layer] = Pending(came.gate(layer), job, room)  # type: ignore[assignment]
        else:
            store.gates[layer] = engine.updating.worker.submit(layer, job, [came.gate(layer)])

    def _nbytes(self, came: BucketedExchange, share: Share) -> int:
        """Peak bytes of applying a share: positions and values of its entries, and a piece of their mean with its update."""
        rows, _, part = came.rows(share.name)
        entries = 0 if part.how is None else part.how.entries
        if not part.whole and not self._raw:
            return 16 * entries
        return 16 * entries * rows.shape[0] + 8 * largest_piece(share.numel, rows.device)

    def _update(
        self,
        came: BucketedExchange,
        updater: Updater,
        count: int,
        step: int,
        share: Share,
        piece: Piece,
        scale: float,
        *,
        own_master: bool,
    ) -> None:
        """Run the optimizer with the mean over the ranks as gradient."""
        for span, mean in mean_pieces(*came.rows(share.name)):
            gradient = mean if scale == 1 else mean.mul_(scale)
            here = replace(piece, gradient=gradient) if span.stop - span.start == share.numel else _part(piece, span, gradient)
            updater.apply(self.rules.of(share.slot.name, step), step, count, here, None, own_master=own_master)

    def _subtract(
        self, came: BucketedExchange, step: int, share: Share, piece: Piece, scale: float, *, own_master: bool, stood: bool
    ) -> None:
        """Subtract the mean of the ranks' own updates. If the gradient `stood` in the weight's buffer, rewrite all of it."""
        optimizer = self.rules.of(share.slot.name, step)
        decay = float(rate(optimizer, step)) * optimizer.weight_decay if isinstance(optimizer, AdamW) else 0.0
        if decay and came.present_anywhere(share.name):  # torch does not decay a parameter without gradient either
            piece.master.mul_(1 - decay)  # the same on all ranks, so it need not be sent
        rows, bucket, part = came.rows(share.name)
        anew = bool(decay) or stood
        subtract_mean(piece.master, rows, bucket, part, scale, None if own_master or anew else piece.weight)
        if anew and not own_master:
            piece.weight.copy_(piece.master)


def _part(piece: Piece, span: slice, gradient: torch.Tensor) -> Piece:
    return Piece(
        inside=slice(piece.inside.start + span.start, piece.inside.start + span.stop),
        weight=piece.weight[span],
        gradient=gradient,
        master=piece.master[span],
        states=[state[span] for state in piece.states],
    )


class Pending:
    """A gate that runs its update lazily, in whoever waits for it, so that the update is ordered with the device's own work.
    `make_room` runs first and may raise: then nothing has changed yet, and the caller may wait again."""

    open = False  # waiting for it runs the update and removes the gate

    def __init__(self, gate: Gate, apply: Callable[[], None], make_room: Callable[[Callable[[], None]], None]) -> None:
        self._gate, self._apply, self._make_room = gate, apply, make_room
        self._begun = False

    def wait(self) -> None:
        self._gate.wait()
        if self._begun:
            raise RunError("an update that had come from other ranks was applied half-way only; load the last checkpoint")
        self._make_room(self._run)

    def _run(self) -> None:
        self._begun = True
        self._apply()

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        self.wait()
