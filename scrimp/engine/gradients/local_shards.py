"""The pieces of trained parameters that this rank exchanges: those in its own shards of the model data.

A rank that holds the whole model has one piece per parameter. If the ranks of a node shard the model, each rank exchanges with
the ranks of the same position in other nodes. Under a plan each rank exchanges its share of its tile with the ranks that have the
same.
"""

from __future__ import annotations

from dataclasses import dataclass

from scrimp.chunks import Opened, Piece, Slot, Store


@dataclass(frozen=True, kw_only=True)
class Share:
    """The `index`-th piece that this rank has of a parameter."""

    slot: Slot
    index: int
    name: str
    numel: int

    def piece(self, data: Opened) -> Piece:
        return data.piece(self.slot, self.index)


def shares_of(store: Store) -> list[list[Share]]:
    """Shares by layer. Ranks that exchange with each other have the same shares under the same names."""
    found = []
    for layer, space in enumerate(store.table.layers):
        here = []
        for slot in space.slots:
            for index, spans in enumerate(store.shards.pieces(layer, slot) if slot.trainable else ()):
                part = "" if store.wire.world == 1 else f"@{spans.inside.start}"
                if store.tiling is not None:
                    part = store.tiling.label(slot.name, store.ranks.rank)
                name = f"{slot.name}{part}"
                here.append(Share(slot=slot, index=index, name=name, numel=spans.inside.stop - spans.inside.start))
        found.append(here)
    return found
