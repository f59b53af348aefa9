"""What a rank exchanges: of every parameter that is trained the pieces that are in its homes. A rank that shares its homes with
nobody has all of each; where they are shared inside a node, each rank meets those of the same place in other nodes."""

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
    """By layer. Those that meet in an exchange have the same, by the same names."""
    found = []
    for layer, space in enumerate(store.table.layers):
        here = []
        for slot in space.slots:
            for index, (inside, _) in enumerate(store.shards.pieces(layer, slot) if slot.trainable else ()):
                name = slot.name if store.wire.world == 1 else f"{slot.name}@{inside.start}"
                here.append(Share(slot=slot, index=index, name=name, numel=inside.stop - inside.start))
        found.append(here)
    return found
