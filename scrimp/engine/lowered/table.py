"""The chunk table of one rank under a plan: each slot is the rank's share of a parameter's tile, flat.

A layer of the table is a layer of the captured model, with the parameters that no earlier layer uses. Weights, gradients and
optimizer states have arenas of their own sizes, because a plan may shard states further than gradients, and these further than
weights. Large slots are aligned; small ones are not, so that padding is never more than one part in a hundred.
"""

from __future__ import annotations

from scrimp.chunks import ChunkTable, LayerSpace, Share, Slot
from scrimp.lower import Lowered, Rest

ALIGN = 64
LARGE = 100 * ALIGN


def planned_table(lowered: Lowered, rank: int) -> ChunkTable:
    owner: dict[str, int] = {}
    spaces = []
    for index, layer in enumerate(lowered.layers):
        used = [name for name in dict.fromkeys(layer.names.values()) if name in lowered.rest]
        here = [lowered.rest[name] for name in used if name not in owner]
        owner |= {each.name: index for each in here}
        needs = tuple(dict.fromkeys([index, *(owner[name] for name in used)]))
        spaces.append(_space(layer.path, here, lowered, rank, needs))
    rest = [each for name, each in lowered.rest.items() if name not in owner]
    if rest:  # parameters that no operator uses
        spaces.append(_space("unused", rest, lowered, rank, (len(spaces),)))
    largest = max((space.numel for space in spaces), default=0)
    return ChunkTable(layers=tuple(spaces), capacity=max(ALIGN, -(-largest // ALIGN) * ALIGN)).check()


def _space(path: str, here: list[Rest], lowered: Lowered, rank: int, needs: tuple[int, ...]) -> LayerSpace:
    mesh, slots = lowered.mesh, []
    ends = dict.fromkeys(("weights", "gradients", "states"), 0)

    def place(arena: str, numel: int) -> int:
        start = _aligned(ends[arena], numel)
        ends[arena] = start + numel
        return start

    for each in sorted(here, key=lambda each: (not each.trained, -each.numel(each.weight, mesh))):
        start, stop = each.span(each.weight, mesh, rank)
        updated, summed = (
            (a - start, b - start) for a, b in (each.span(axes, mesh, rank) for axes in (each.states, each.gradient))
        )
        share = Share(
            updated=updated if each.trained else (0, stop - start),
            summed=summed if each.trained else (0, 0),
            gradient_start=place("gradients", summed[1] - summed[0]) if each.trained else 0,
            state_start=place("states", updated[1] - updated[0]) if each.trained else 0,
        )
        begin = place("weights", stop - start)
        slots.append(Slot(name=each.name, shape=(stop - start,), start=begin, trainable=each.trained, share=share))
    return LayerSpace(
        path=path, slots=tuple(slots), numel=ends["weights"], trained=ends["states"], needs=needs, summed=ends["gradients"]
    )


def _aligned(position: int, numel: int) -> int:
    return -(-position // ALIGN) * ALIGN if numel >= LARGE else position
