"""Lowers a plan with pipeline stages: every piece on the mesh of its stage, and what crosses the borders between pieces.

In:   a `Plan` with a schedule, and the `Graph` of one micro-batch.
Out:  a `Staged`: the lowered pieces, the tensors that cross each border, and for each stage the order of its turns.

A piece is lowered as a model whose inputs from other pieces are tensors of its batch. Only neighbours exchange tensors: a value
that a later piece reads passes through all pieces between, and its gradient comes back the same way. A piece that only passes a
value on, or a gradient, holds it split over all ranks as far as its dims allow that.

All ranks lower all pieces, so that both sides of a border know both placements. Nothing here needs torch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product

from scrimp.capture import Graph, Value
from scrimp.errors import RunError
from scrimp.layout import Mesh
from scrimp.lower.checker import check, digest
from scrimp.lower.choice import ChosenLayer
from scrimp.lower.model import Lowered, lower_layers, rest_of_layers, unused, verified
from scrimp.lower.steps import Store
from scrimp.lower.weights.rest import Rest
from scrimp.planner import Piece, Placed, Plan, Task, between, common, piece, placed, tasks, unsplit

EXPECT, TAKE, RUN, SEND, SENT = "expect", "take", "run", "send", "sent"
Box = tuple[tuple[int, int], ...]


@dataclass(frozen=True, kw_only=True)
class Crossing:
    """A tensor between two pieces, by its maker's layer and name ("3:add"). `held`: its placement in the piece that sends it;
    `before`: the placement in which it is sent, `after`: that in which it arrives. `order`: of its dims in memory."""

    name: str
    dtype: str
    order: tuple[int, ...]
    held: Placed
    before: Placed
    after: Placed


@dataclass(frozen=True, kw_only=True)
class Message:
    """The part of a crossing from one rank of a stage to one rank of another: its place in the tile of either."""

    sender: int
    receiver: int
    source: Box
    target: Box


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One turn of a stage. `task`: the one that the stage runs or takes tensors for; of SEND and SENT the one that gets them."""

    kind: str
    task: Task


@dataclass(frozen=True, kw_only=True)
class LoweredPiece:
    """`takes`, `gives`: what the forward gets from the piece before, and sends to the piece after. `back_takes`, `back_gives`:
    the gradients that the backward gets from the piece after, and sends to the piece before."""

    lowered: Lowered
    takes: tuple[Crossing, ...]
    gives: tuple[Crossing, ...]
    back_takes: tuple[Crossing, ...]
    back_gives: tuple[Crossing, ...]

    def key(self, name: str) -> tuple[int, str] | None:
        """Where this piece makes a value; None if an earlier one does."""
        layer, of = maker(name)
        return (layer - self.lowered.first, of) if layer >= self.lowered.first else None


@dataclass(frozen=True, kw_only=True)
class Staged:
    """`pieces` in model order: stage s of S has the pieces s, S + s and so on. `rest`: of each stage; parameters that no operator
    uses are on the first. `tied`: each weight with a gradient that several stages use, and these stages."""

    mesh: Mesh
    stages: int
    micro_batches: int
    pieces: tuple[LoweredPiece, ...]
    rest: tuple[Mapping[str, Rest], ...]
    tied: tuple[tuple[str, tuple[int, ...]], ...]

    def names(self, stage: int) -> frozenset[str]:
        """The parameters and buffers that a stage holds."""
        pieces = self.pieces[stage :: self.stages]
        used = (name for each in pieces for layer in each.lowered.layers for name in layer.names.values())
        return frozenset([*used, *self.rest[stage]])

    def written(self) -> tuple[tuple[str, int], ...]:
        """Each buffer that a forward writes, and the stage that does."""
        return tuple(
            (layer.names[step.buffer], k % self.stages)
            for k, each in enumerate(self.pieces)
            for layer in each.lowered.layers
            for step in layer.ahead.steps
            if isinstance(step, Store)
        )

    def check(self) -> None:
        """Raises `RunError` with the layer and the step that are wrong."""
        for each in self.pieces:
            check(each.lowered)

    def digest(self) -> str:
        """Equal on two ranks exactly when they run the same steps of the same pieces."""
        borders = repr([(each.takes, each.back_takes) for each in self.pieces])
        texts = [f"{self.stages} {self.micro_batches}", borders, *(digest(each.lowered) for each in self.pieces)]
        return hashlib.sha256("\n".join(texts).encode()).hexdigest()


def lower_stages(plan: Plan, graph: Graph) -> Staged:
    """Raises `RunError` if the plan was not made for this graph, the graph of one micro-batch."""
    if plan.schedule is None:
        raise RunError("the plan has neither stages nor micro-batches: lower it with `lower`")
    layers, stages, mesh = verified(plan, graph), plan.schedule.stages, plan.mesh
    cuts = sorted(span for stage in stages for span in stage.pieces)
    pieces = [piece(graph, first, stop) for first, stop in cuts]
    received = {
        (each.piece, each.name, each.gradient): Placed(each.factors) for stage in stages for each in stage.arrivals
    }  # fmt: skip
    if len(pieces) > 1 and not received:
        raise RunError("the plan file has no placements of the tensors between its stages; plan again with scrimp.plan")
    rest = []
    for s in range(len(stages)):
        mine = [k for each in pieces[s :: len(stages)] for k in range(each.first, each.stop)]
        rest.append(_rest(layers, graph, mine, mesh))
    rest[0] |= unused(graph, {name for each in rest for name in each}, mesh)
    lowered = [
        _piece(each, layers[each.first : each.stop], mesh, rest[k % len(stages)], received) for k, each in enumerate(pieces)
    ]
    ahead = [(), *(_ahead(graph, pieces, lowered, k, mesh) for k in range(1, len(pieces))), ()]
    behind = [(), *(_behind(graph, pieces, lowered, k, mesh) for k in range(1, len(pieces))), ()]
    trained = {name for each in lowered for name in each.partials}
    tied = [(name, tuple(s for s, each in enumerate(rest) if name in each)) for name in sorted(trained)]
    return Staged(
        mesh=mesh,
        stages=len(stages),
        micro_batches=plan.schedule.micro_batches,
        pieces=tuple(
            LoweredPiece(
                lowered=each, takes=ahead[k], gives=ahead[k + 1], back_takes=behind[k + 1], back_gives=behind[k]
            )
            for k, each in enumerate(lowered)
        ),
        rest=tuple(rest),
        tied=tuple((name, where) for name, where in tied if len(where) > 1),
    )  # fmt: skip


def turns(stage: int, stages: int, micro_batches: int, interleave: int) -> tuple[Turn, ...]:
    """All turns of a stage in order. A task starts after its tensors have arrived, and after those that it sent before have: so
    each border has one buffer on either side, each way."""
    pieces = stages * interleave

    def given(task: Task) -> bool:
        return task.piece < pieces - 1 if task.backward else task.piece > 0

    def following(task: Task) -> Task | None:
        there = task.piece + (-1 if task.backward else 1)
        return Task(piece=there, micro=task.micro, backward=task.backward) if 0 <= there < pieces else None

    order = tasks(stage, stages, micro_batches, interleave)
    found = [Turn(kind=EXPECT, task=task) for task in order if task.micro == 0 and given(task)]
    waiting: dict[tuple[int, bool], Task] = {}
    for task in order:
        if sent := waiting.pop((task.piece, task.backward), None):
            found.append(Turn(kind=SENT, task=sent))
        if given(task):
            found.append(Turn(kind=TAKE, task=task))
            if task.micro + 1 < micro_batches:
                found.append(Turn(kind=EXPECT, task=Task(piece=task.piece, micro=task.micro + 1, backward=task.backward)))
        found.append(Turn(kind=RUN, task=task))
        if after := following(task):
            found.append(Turn(kind=SEND, task=after))
            waiting[task.piece, task.backward] = after
    return (*found, *(Turn(kind=SENT, task=task) for task in waiting.values()))


@lru_cache(maxsize=1 << 12)
def messages(before: Placed, after: Placed, mesh: Mesh) -> tuple[Message, ...]:
    """Who sends what to whom so that every rank of the other stage gets its tile: of several ranks with the same numbers the one
    at the same position sends, else they take turns."""
    found = common(before, after, mesh)
    assert found is not None, (before, after)
    shape, src, dst = found
    holders: dict[Box, list[int]] = {}
    for rank in range(mesh.size):
        holders.setdefault(tuple(src.tile(shape, mesh, rank)), []).append(rank)
    made = []
    for receiver in range(mesh.size):
        wanted = tuple(dst.tile(shape, mesh, receiver))
        for tile, ranks in holders.items():
            box = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(tile, wanted, strict=True))
            if all(start < stop for start, stop in box):
                sender = receiver if receiver in ranks else ranks[receiver % len(ranks)]
                made.append(
                    Message(sender=sender, receiver=receiver, source=_inside(box, tile), target=_inside(box, wanted))
                )  # fmt: skip
    return tuple(made)


def tile_shape(place: Placed, other: Placed, mesh: Mesh) -> tuple[int, ...]:
    """The shape of a rank's tile over the factors of a message's boxes. All ranks have the same."""
    found = common(place, other, mesh)
    assert found is not None, (place, other)
    return tuple(found[1].local_shape(found[0], mesh, 0))


def _inside(box: Box, tile: Box) -> Box:
    return tuple((start - begin, stop - begin) for (start, stop), (begin, _) in zip(box, tile, strict=True))


def _rest(layers: Sequence[ChosenLayer], graph: Graph, mine: Sequence[int], mesh: Mesh) -> dict[str, Rest]:
    part = replace(graph, layers=tuple(graph.layers[k] for k in mine))
    return rest_of_layers([layers[k] for k in mine], part, mesh)


def _piece(
    each: Piece,
    layers: Sequence[ChosenLayer],
    mesh: Mesh,
    rest: Mapping[str, Rest],
    received: Mapping[tuple[int, str, bool], Placed],
) -> Lowered:
    batch = {name: received[each.first, name, False] for name in each.arrivals if (each.first, name, False) in received}
    for layer, chosen in zip(each.graph.layers, layers, strict=True):
        for name, source in zip(chosen.model.borders, layer.inputs, strict=True):
            if source.layer is None and source.name not in batch:
                batch[source.name] = _first_use(chosen, name)
    tangents: dict[tuple[int | None, str], Placed] = {
        (layer, name): place
        for layer, name in sorted(each.departures)
        if (place := received.get((each.first, f"{each.first + layer}:{name}", True))) is not None
    }
    return lower_layers(
        each.graph, layers, mesh, rest, batch, first=each.first, arrivals=each.arrivals, tangents=tangents
    )  # fmt: skip


def _first_use(chosen: ChosenLayer, name: str) -> Placed:
    """As the first operator needs it that reads it: every rank cuts its part of the batch so."""
    for op in chosen.ops:
        for given, place in zip(op.op.inputs, op.inputs, strict=True):
            if given == name:
                return place
    return unsplit(chosen.values[name].shape)


def maker(name: str) -> tuple[int, str]:
    """The layer that makes a value, and its name there: of "3:add" 3 and "add"."""
    layer, _, of = name.partition(":")
    return int(layer), of


def _value(graph: Graph, name: str, *, gradient: bool = False) -> Value:
    """A value, or its gradient that arrives in the layer that made it."""
    layer, of = maker(name)
    made = graph.graphs[graph.layers[layer].graph]
    wanted = dict(made.tangents)[of] if gradient else of
    return next(value for value in made.values if value.name == wanted)


def _made(lowered: Lowered, layer: int, of: str) -> Placed:
    front = lowered.layers[layer - lowered.first].ahead
    return front.slots[dict(front.outputs)[of]].place.complete()


def _ahead(graph: Graph, pieces: Sequence[Piece], lowered: Sequence[Lowered], k: int, mesh: Mesh) -> tuple[Crossing, ...]:
    """What crosses the border before piece k in the forward."""

    def place(at: int, name: str) -> Placed:
        """The placement in which a piece holds it."""
        if maker(name)[0] >= pieces[at].first:
            return _made(lowered[at], *maker(name))
        return lowered[at].batch[name] if name in lowered[at].batch else spread(_value(graph, name).shape, mesh)

    names = dict.fromkeys(name for each in pieces[k:] for name in each.arrivals if maker(name)[0] < pieces[k].first)
    return tuple(
        crossing(name, (value := _value(graph, name)).dtype, tuple(value.order), place(k - 1, name), place(k, name), mesh)
        for name in names
    )


def _behind(graph: Graph, pieces: Sequence[Piece], lowered: Sequence[Lowered], k: int, mesh: Mesh) -> tuple[Crossing, ...]:
    """The gradients that cross the border before piece k in the backward, of all values that cross it forward and have one."""

    def sent(name: str) -> Placed:
        later = any(name in each.gradients for each in lowered[k + 1 :])
        return spread(_value(graph, name).shape, mesh) if later else lowered[k].gradients[name]

    def taken(name: str) -> Placed:
        layer, of = maker(name)
        if layer < pieces[k - 1].first:
            return spread(_value(graph, name).shape, mesh)
        return dict(lowered[k - 1].layers[layer - pieces[k - 1].first].arrives)[of]

    names = dict.fromkeys(
        name
        for at in range(k, len(pieces))
        for name in lowered[at].gradients
        if maker(name)[0] < pieces[k].first and _has_tangent(graph, name)
    )
    return tuple(
        crossing(name, (value := _value(graph, name, gradient=True)).dtype, tuple(value.order), sent(name), taken(name), mesh)
        for name in names
    )


def _has_tangent(graph: Graph, name: str) -> bool:
    layer, of = maker(name)
    return of in dict(graph.graphs[graph.layers[layer].graph].tangents)


def crossing(name: str, dtype: str, order: tuple[int, ...], held: Placed, after: Placed, mesh: Mesh) -> Crossing:
    direct = common(held.permuted(order), after.permuted(order), mesh) is not None
    before = held if direct else between(held, after, mesh)
    return Crossing(name=name, dtype=dtype, order=order, held=held, before=before, after=after)


def spread(shape: Sequence[int], mesh: Mesh) -> Placed:
    """Split over every axis of the mesh for which a dim is large enough."""
    left = [*shape]
    axes: list[tuple[str, ...]] = [()] * len(shape)
    for axis, dim in product(mesh.names, range(len(shape))):
        size = mesh.axis_size(axis)
        if not any(axis in each for each in axes) and left[dim] % size == 0 and left[dim] >= size:
            left[dim] //= size
            axes[dim] = (*axes[dim], axis)
    return placed([[(size, over)] for size, over in zip(shape, axes, strict=True)])
