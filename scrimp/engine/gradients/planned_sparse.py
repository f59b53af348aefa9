"""Sparse exchange under a plan: ranks along one mesh axis exchange their summands of each gradient, tile by tile.

The lowered program has summed gradients along all other axes. So each rank has its share of a tile, and exchanges it with the
ranks that have the same share along the axis. Ranks that are replicas along another axis bring the same numbers, select the same
entries, and stay equal to the bit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from scrimp.chunks import ChunkTable, Rules, Slot, Store, Wire
from scrimp.engine.gradients.replica_check import compare_tiles
from scrimp.engine.gradients.sparse import SparseExchange, sending_nbytes
from scrimp.exchange import AUTO, RESIDUAL_KINDS, BucketedExchange, Dense, Member, Pace, Sparse, residual_nbytes

if TYPE_CHECKING:
    from scrimp.engine._training import Training


class PlannedSparseExchange(SparseExchange):
    def __init__(self, settings: Sparse, store: Store, rules: Rules, wire: Wire) -> None:
        super().__init__(settings, store, rules, wire)
        rows = wire.every(torch.tensor([store.ranks.rank]))
        self._partners: list[int] = rows.flatten().tolist()
        self._group = self._partners[0]

    def _measured_pace(self) -> Pace:
        """The slowest of all ranks: replicas along other axes must choose alike."""
        pace = super()._measured_pace()
        rows = self.store.ranks.every(torch.tensor([pace.network, pace.selecting], dtype=torch.float64))
        network, selecting = rows.amin(0).tolist()
        return Pace(network=network, selecting=selecting)

    def meet(self, engine: Training) -> None:
        if engine.steps and engine.steps % self.settings.check_every == 0:
            compare_tiles(engine, self.store)

    def receive(self, engine: Training, layer: int, slot: Slot, gradient: torch.Tensor, *, first: bool) -> None:
        if self._at_once(layer):
            self._consume(engine, layer, slot, gradient, first=first)
        else:
            self.store.take(layer, slot, gradient, first=first)

    def retire(self, engine: Training, layer: int, arrived: list[tuple[Slot, bool]]) -> None:
        """Gradients are on the tier of their layer already."""
        self._retired(engine, layer)

    def finish(self, engine: Training) -> None:
        before = engine.skipped
        super().finish(engine)
        if engine.skipped == before:
            engine.under_plan.weights.updates += 1

    def _bad(self, engine: Training, going: BucketedExchange) -> str | None:
        """This rank has not seen the tiles that other ranks exchanged."""
        found, slots = going.bad(), [share.slot.name for shares in self._trained for share in shares]
        mine = [0, 0]
        if found is not None:
            names = [share.name for shares in self._trained for share in shares]
            mine = [1 + names.index(found[0]), self._partners[found[1]]]
        rows = self.store.ranks.every(torch.tensor(mine))
        at, rank = rows[rows[:, 0].argmax()].tolist()
        return f"gradient of {slots[at - 1]} is not finite on rank {rank}" if at else None


def sparse_nbytes(table: ChunkTable, settings: Dense | Sparse | None, world: int, device: torch.device) -> int:
    """Device bytes that come on top of the plan's: residuals, and packets with the scratch of selecting them."""
    if not isinstance(settings, Sparse):
        return 0
    members, kept = [], 0
    kind = RESIDUAL_KINDS[0] if settings.residual == AUTO else settings.residual
    for layer, space in enumerate(table.layers):
        sizes = []
        for slot in space.slots:
            if slot.trainable and slot.share is not None:
                numel = slot.share.updated[1] - slot.share.updated[0]
                sizes.append((slot.name, numel))
                if numel >= settings.small and settings.density < 1 and settings.place != "host":
                    kept += residual_nbytes(kind, numel)
        if sizes:
            members.append(Member(layer=layer, sizes=tuple(sizes), device=device))
    return kept + sending_nbytes(settings, tuple(members), world, device)
