"""Classes of ranks: ranks of one stage whose steps take the same bytes, because all their sizes are equal.

All ranks of a stage run the same steps. They differ in the parts that a move sends where tiles are uneven or replicas take turns;
in operators of which one member does more than the others, such as one that adds a bias to a partial sum; and in the messages
between stages.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable

from scrimp.engine import LoneRank
from scrimp.layout import Mesh
from scrimp.lower import Staged, crossing, messages
from scrimp.move import Program, sizes_by_rank
from scrimp.planner import Placed
from scrimp.rules import plain_call


def classes(lone: LoneRank, moves: Iterable[Program]) -> list[tuple[int, ...]]:
    """The mesh ranks of each class of the stage of a rank. `moves`: all that a step runs."""
    program = lone.program
    found: list[list[Hashable]] = [[each] for each in _operators(lone, program.plan.mesh)]
    rows = [*map(sizes_by_rank, moves)]
    if program.staged is not None:
        rows += _messages(program.staged, program.stage)
    for row in rows:
        for each, sizes in zip(found, row, strict=True):
            each.append(sizes)
    alike: dict[Hashable, list[int]] = defaultdict(list)
    for rank, key in enumerate(found):
        alike[tuple(key)].append(rank)
    return [*map(tuple, alike.values())]


def _operators(lone: LoneRank, mesh: Mesh) -> list[Hashable]:
    """By rank: which operators are more than a plain call. That depends on which coordinates are 0."""
    known: dict[Hashable, Hashable] = {}
    layers = {id(layer.chosen): layer.chosen for piece in lone.program.part.pieces for layer in piece.layers}
    found = []
    for rank in range(mesh.size):
        first = tuple(mesh.coordinate(rank, axis) == 0 for axis in mesh.names)
        if first not in known:
            known[first] = tuple(
                plain_call(op.op, op.rule, dict(op.split), mesh, rank) is None for layer in layers.values() for op in layer.ops
            )
        found.append(known[first])
    return found


def _messages(staged: Staged, stage: int) -> list[list[Hashable]]:
    """By crossing and rank: the shapes of what a rank sends and receives."""
    ends: list[tuple[Placed, Placed]] = []
    for piece in staged.pieces[stage :: staged.stages]:
        for each in (*piece.takes, *piece.gives, *piece.back_takes, *piece.back_gives):
            ends.append((each.before.permuted(each.order), each.after.permuted(each.order)))
    for name, stages in staged.tied:
        uses = [staged.rest[s][name].use for s in stages]
        if stage in stages:
            here = staged.rest[stage][name]
            both = [
                crossing(name, here.dtype, (), *pair, staged.mesh) for use in uses for pair in ((use, here.use), (here.use, use))
            ]
            ends += [(each.before, each.after) for each in both]
    found: list[list[Hashable]] = []
    for before, after in dict.fromkeys(ends):
        row: list[list[Hashable]] = [[] for _ in range(staged.mesh.size)]
        for message in messages(before, after, staged.mesh):
            shape = tuple(stop - start for start, stop in message.source)
            row[message.sender].append(("sends", shape))
            row[message.receiver].append(("receives", shape))
        found.append([tuple(sorted(parts, key=str)) for parts in row])
    return found
