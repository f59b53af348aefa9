"""Buckets for a stage of a pipeline, which has several micro-batches in flight.

A pass of a piece takes what it takes for one micro-batch alone. Besides, there is what the forwards of all micro-batches in
flight have saved; how many there are follows from the order of the stage's tasks. A pass runs once for each micro-batch, always
with the same buckets: so its room is that of the time when most is saved.

What arrives from other stages lies in buffers that stay for the whole step, and is left out. What is sent to them is held until
it has arrived: it counts as if it were there all the time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import chain, pairwise
from math import prod

from scrimp.lower.footprint import Border, Pass, piece_footprint
from scrimp.lower.stages import Crossing, LoweredPiece, Staged, messages
from scrimp.lower.weights.buckets import Buckets, Later, buckets_of
from scrimp.move import ITEMSIZE
from scrimp.planner import Task, tasks


def stage_buckets(staged: Staged, stage: int, later: Later) -> Buckets:
    """`later`: the axes along which a gradient is summed at the end of the step (`later_axes`)."""
    rooms = stage_rooms(staged, stage)
    order, found = _order(staged, stage), []
    for k in range(stage, len(staged.pieces), staged.stages):
        found.append(buckets_of(staged.pieces[k].lowered, later, rooms, keeps=_follows(order, k)))
    return Buckets(
        passes=dict(chain.from_iterable(each.passes.items() for each in found)),
        names=dict(chain.from_iterable(each.names.items() for each in found)),
        room_nbytes=max(each.room_nbytes for each in found),
    )


def stage_rooms(staged: Staged, stage: int) -> dict[Pass, list[int]]:
    """By pass of each layer, the bytes that may be added at each step without raising the peak of the stage."""
    numbers = range(stage, len(staged.pieces), staged.stages)
    alone = {k: piece_footprint(staged.pieces[k].lowered, border_of(staged.pieces[k])) for k in numbers}
    beside = _beside(_order(staged, stage), {k: saved for k, (_, saved) in alone.items()})
    besides = sum(_sent_nbytes(staged, staged.pieces[k]) for k in numbers) + _shared_nbytes(staged, stage)
    every = [(key, found, beside[k, key[1]]) for k, (passes, _) in alone.items() for key, found in passes.items()]
    peak = max(max(found.held) + others for _, found, others in every if found.held)
    return {key: [peak - nbytes - others - besides for nbytes in found.most] for key, found, others in every}


def border_of(piece: LoweredPiece) -> Border:
    lowered, sizes = piece.lowered, dict(piece.lowered.mesh.axes)
    dtypes = {
        source.name: layer.chosen.values[name].dtype
        for layer in lowered.layers for name, source in layer.sources if source.layer is None
    }  # fmt: skip

    def nbytes(each: Crossing) -> int:
        return each.after.numel(sizes) * ITEMSIZE[each.dtype]

    passed = [each for each in piece.takes if any(other.name == each.name for other in piece.gives)]
    relayed = [each for each in piece.back_takes if piece.key(each.name) is None]
    return Border(
        takes={name: lowered.batch[name].numel(sizes) * ITEMSIZE[dtype] for name, dtype in dtypes.items()},
        through=frozenset(each.name for each in passed if each.name in dtypes),
        leaves=frozenset(key for each in piece.gives if (key := piece.key(each.name)) is not None),
        arrives=frozenset(key for each in piece.back_takes if (key := piece.key(each.name)) is not None),
        passed=(sum(nbytes(each) for each in passed if each.name not in dtypes), sum(map(nbytes, relayed))),
    )


def _order(staged: Staged, stage: int) -> tuple[Task, ...]:
    return tuple(tasks(stage, staged.stages, staged.micro_batches, len(staged.pieces) // staged.stages))


def _beside(order: tuple[Task, ...], saved: Mapping[int, int]) -> dict[tuple[int, bool], int]:
    """By piece and direction, the most bytes that other micro-batches, and other pieces, have saved while it runs."""
    flying: Counter[int] = Counter()
    found: dict[tuple[int, bool], int] = {}
    for task in order:
        if task.backward:
            flying[task.piece] -= 1
        others = sum(count * saved[k] for k, count in flying.items())
        found[task.piece, task.backward] = max(found.get((task.piece, task.backward), 0), others)
        if not task.backward:
            flying[task.piece] += 1
    return found


def _follows(order: tuple[Task, ...], piece: int) -> bool:
    """Whether each backward of a piece follows the forward of the same micro-batch at once."""
    pairs = {(one, other) for one, other in pairwise(order)}
    mine = [task for task in order if task.piece == piece and not task.backward]
    return all((task, Task(piece=piece, micro=task.micro, backward=True)) in pairs for task in mine)


def _sent_nbytes(staged: Staged, piece: LoweredPiece) -> int:
    """What a rank sends in one task of each direction: of the rank that sends most."""
    found: Counter[int] = Counter()
    for each in (*piece.gives, *piece.back_gives):
        before, after = each.before.permuted(each.order), each.after.permuted(each.order)
        for message in messages(before, after, staged.mesh):
            found[message.sender] += prod(stop - start for start, stop in message.source) * ITEMSIZE[each.dtype]
    return max(found.values(), default=0)


def _shared_nbytes(staged: Staged, stage: int) -> int:
    """Shares of gradients that wait for a summand of another piece of the stage, unless gradients have a place at rest."""
    pieces = [each.lowered for each in staged.pieces[stage :: staged.stages]]
    count = Counter(name for each in pieces for name in each.partials)
    rest = staged.rest[stage]
    return sum(
        rest[name].numel(rest[name].gradient, staged.mesh) * ITEMSIZE[rest[name].dtype] for name, k in count.items() if k > 1
    )
