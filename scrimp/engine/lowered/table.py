"""The chunk table of one rank under a plan: each slot is the rank's share of a parameter's tile, flat.

A layer of the table is a layer of the captured model, with the parameters that no earlier layer uses. Weights, gradients and
optimizer states have arenas of their own sizes, because a plan may shard states further than gradients, and these further than
weights. Large slots are aligned; small ones are not, so that padding is never more than one part in a hundred.

Under pipeline stages all ranks have all layers and slots, in the same order. A slot of a parameter that only other stages hold is
empty. So ranks of all stages name the same layers and parameters, in checkpoints and when they agree on a step.
"""

from __future__ import annotations

from math import prod

from scrimp.chunks import ChunkTable, LayerSpace, Share, Slot
from scrimp.engine.lowered.program import Program
from scrimp.lower import Rest

ALIGN = 64
LARGE = 100 * ALIGN


def planned_table(program: Program, dtype: str) -> tuple[ChunkTable, tuple[int, ...]]:
    """The table, and the place in it of each layer of the model. Parameters of another dtype than `dtype` (fp32, of modules with
    running statistics) have a layer of their own, which comes first and is fetched with the other."""
    owner: dict[str, int] = {}
    spaces: list[LayerSpace] = []
    at: list[int] = []
    every = {name: program.rest(name) for name in program.holders}
    for layer in program.layers:
        used = [name for name in dict.fromkeys(layer.names.values()) if name in every]
        here = [every[name] for name in used if name not in owner]
        wide = [each for each in here if each.dtype != dtype]
        if wide:
            owner |= dict.fromkeys((each.name for each in wide), len(spaces))
            spaces.append(_space(layer.path, wide, program, (len(spaces),), wide=True))
        rest = [each for each in here if each.dtype == dtype]
        owner |= dict.fromkeys((each.name for each in rest), len(spaces))
        needs = tuple(dict.fromkeys([len(spaces), *(owner[name] for name in used)]))
        at.append(len(spaces))
        spaces.append(_space(layer.path, rest, program, needs))
    unused = [each for name, each in every.items() if name not in owner]
    if unused:
        spaces.append(_space("unused", unused, program, (len(spaces),)))
    largest = max((space.numel for space in spaces), default=0)
    return ChunkTable(layers=tuple(spaces), capacity=max(ALIGN, -(-largest // ALIGN) * ALIGN)).check(), tuple(at)


def _space(path: str, here: list[Rest], program: Program, needs: tuple[int, ...], *, wide: bool = False) -> LayerSpace:
    mesh, rank, held, slots = program.plan.mesh, program.rank, program.part.rest, []
    ends = dict.fromkeys(("weights", "gradients", "states"), 0)

    def place(arena: str, numel: int) -> int:
        start = _aligned(ends[arena], numel)
        ends[arena] = start + numel
        return start

    for any_of in sorted(here, key=lambda each: (not each.trained, -prod(each.shape))):
        if any_of.name not in held:
            share = Share(
                updated=(0, 0), summed=(0, 0), gradient_start=ends["gradients"], state_start=ends["states"], held=False
            )  # fmt: skip
            slots.append(Slot(name=any_of.name, shape=(0,), start=ends["weights"], trainable=any_of.trained, share=share))
            continue
        each = held[any_of.name]
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
        path=path, slots=tuple(slots), numel=ends["weights"], trained=ends["states"], needs=needs, summed=ends["gradients"],
        wide=wide, wrapped=not wide,
    )  # fmt: skip


def _aligned(position: int, numel: int) -> int:
    return -(-position // ALIGN) * ALIGN if numel >= LARGE else position
