"""The tensors that a pipeline piece receives from and sends to other pieces, in the problem of its stage.

A received tensor, an input or the gradient of an output, arrives in a permanent buffer. Its placement there is a node whose
options are the placements that its users need; a copy is held while it is used. An input is held until its last user's backward,
by every micro-batch in flight. A sent tensor is held until it is sent, at the latest when the piece makes the next one. A relayed
tensor is split over all devices, and takes memory in a receive and in a send buffer.

A transfer moves a device's share over the link to the other piece. It overlaps with compute: the schedule determines the part
that is exposed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from scrimp.capture import Value
from scrimp.cluster import DEFAULT_LINK, Link
from scrimp.move import ITEMSIZE
from scrimp.planner.formulation.builder import (
    ACTIVATIONS,
    AWAY,
    BACKWARD,
    FLIGHT,
    FORWARD,
    GRADIENT,
    INPUT,
    TEMPORARIES,
    Numbers,
)  # fmt: skip
from scrimp.planner.shard.layer_model import Use
from scrimp.planner.shard.options import Option
from scrimp.planner.shard.placement import Placed
from scrimp.planner.shard.stage_subgraph import Relay

if TYPE_CHECKING:
    from scrimp.planner.formulation.assembly import Assembly


@dataclass(frozen=True, kw_only=True)
class Outside:
    """As in `Piece`; `held`: parameters that an earlier piece of the same stage holds. `first`: whether the piece is the first of
    its stage, which holds the model's buffers. `ahead` and `behind`: the links from the pieces before and after it, `far` the
    link to the piece that shares its parameters, where there is one."""

    arrivals: tuple[str, ...] = ()
    departures: frozenset[tuple[int, str]] = frozenset()
    relays: tuple[Relay, ...] = ()
    shared: frozenset[str] = frozenset()
    held: frozenset[str] = frozenset()
    first: bool = True
    ahead: Link = DEFAULT_LINK
    behind: Link = DEFAULT_LINK
    far: Link = DEFAULT_LINK

    def shared_seconds(self, nbytes: Numbers) -> Numbers:
        """Seconds of summing gradients with another piece: each receives the other's."""
        return self.far.latency_seconds + nbytes / self.far.bytes_per_second


NOWHERE = Outside()


@dataclass(frozen=True, kw_only=True)
class Reading:
    """Layers of a part that use a received tensor, by the name it has there: one use, by so many of them."""

    part: int
    name: str
    use: Use
    copies: int


def draw_outside(problem: Assembly) -> None:
    outside = problem.outside
    for k, arrival in enumerate(outside.arrivals):
        _input(problem, k, arrival)
    for layer, output in sorted(outside.departures):
        _output(problem, layer, output)
    for relay in outside.relays:
        _relay(problem, relay)


def _input(problem: Assembly, k: int, arrival: str) -> None:
    readings = [*_readings(problem, arrival)]
    if not readings:
        return
    node, made, nbytes = _lands(problem, readings, problem.outside.ahead, INPUT)
    problem.inputs[k] = node
    last = max(_last(problem, reading) for reading in readings)
    value, saved = _value(problem, readings[0]), last >= problem.turn
    for span in ((0, last), FLIGHT) if saved else ((0, last),):
        kind = ACTIVATIONS if saved else TEMPORARIES
        problem.sketch.hold(node, *span, kind, nbytes)
        problem.sketch.must_be(*span, kind, prod(value.shape) * ITEMSIZE[value.dtype])
    for reading in readings:
        again = problem.used(node, made, reading.part, reading.use, reading.name, reading.copies)
        until = _recomputed(problem, reading)
        if again is not None and until > last:  # by the options that recompute
            pair = (node, problem.nodes[reading.part, reading.use.group])
            for span in ((last + 1, until),) if saved else ((last + 1, until), FLIGHT):
                problem.sketch.pair_hold(*pair, *span, ACTIVATIONS, nbytes[:, None] * again)
    done = set()
    for reading in readings:
        model = problem.parts[reading.part].model
        gradient = dict(model.graph.gradients).get(reading.name)
        if gradient is not None and (reading.part, gradient) not in done:
            done.add((reading.part, gradient))
            _goes(problem, reading.part, gradient, BACKWARD)


def _output(problem: Assembly, layer: int, output: str) -> None:
    k = problem.part_of[layer]
    part = problem.parts[k]
    _goes(problem, k, output, FORWARD)
    tangent = dict(part.model.graph.tangents).get(output)
    readings = [Reading(part=k, name=tangent, use=use, copies=1) for use in part.model.uses.get(tangent or "", ()) if tangent]
    if not readings:
        return
    node, made, nbytes = _lands(problem, readings, problem.outside.behind, GRADIENT)
    problem.tangents[layer, output] = node
    last = max(part.point(span[1]) for reading in readings for span in reading.use.spans)
    problem.sketch.hold(node, problem.turn, last, TEMPORARIES, nbytes)
    for reading in readings:
        problem.used(node, made, reading.part, reading.use, reading.name, reading.copies)


def _lands(problem: Assembly, readings: list[Reading], link: Link, when: str) -> tuple[int, list[Placed], Numbers]:
    """A node with the placements of a received tensor, and their bytes."""
    made = [*dict.fromkeys(option.needed[each.name] for each in readings for option in _options(problem, each))]
    node = problem.sketch.node(f"{when} from outside", [str(place) for place in made])
    problem.received[node] = made
    nbytes = ITEMSIZE[_value(problem, readings[0]).dtype] * np.array([problem.numel(place) for place in made])
    for span in problem.sketch.always:
        problem.sketch.hold(node, *span, TEMPORARIES, nbytes)
    problem.sketch.cost(node, np.array([link.seconds(1, each) for each in nbytes]), when)
    return node, made, nbytes


def _goes(problem: Assembly, k: int, name: str, when: str) -> None:
    """Holds a sent tensor until it is sent: at most through all points before the same tensor is made again. Partial sums are
    reduced before."""
    part, model = problem.parts[k], problem.parts[k].model
    root = model.values[name].storage
    if root not in model.lives or name not in model.makers:
        return  # a view of a value from another piece
    group, sketch = model.makers[name], problem.sketch
    node, ways = problem.nodes[k, group], problem.ways[k, group]
    places = [option.made[name] for option in model.options[group]]
    itemsize = ITEMSIZE[model.values[name].dtype]
    sums = np.array([problem.moves.seconds(place, place.complete(), itemsize) for place in places])
    sketch.cost(node, ways.repeat(sums), when)
    nbytes = ways.repeat(itemsize * np.array([problem.numel(place) for place in places]))
    last = part.point(model.lives[root][1])
    if last + 1 < sketch.points:
        sketch.hold(node, last + 1, sketch.points - 1, TEMPORARIES, nbytes)
    if when == BACKWARD:
        sketch.hold(node, 0, problem.turn - 1, TEMPORARIES, nbytes)
    sketch.hold(node, *AWAY, TEMPORARIES, nbytes)


def _relay(problem: Assembly, relay: Relay) -> None:
    nbytes = -(-prod(relay.value.shape) // problem.moves.mesh.size) * ITEMSIZE[relay.value.dtype]
    node = problem.sketch.node(f"through/{relay.value.name}", ["split over all"])
    for there, link, when in ((relay.forward, problem.outside.ahead, INPUT), (relay.gradient, problem.outside.behind, GRADIENT)):
        if there:
            for span in problem.sketch.always:
                problem.sketch.hold(node, *span, TEMPORARIES, np.array([2 * nbytes]))
            problem.sketch.cost(node, np.array([link.seconds(1, nbytes)]), when)


def _readings(problem: Assembly, arrival: str) -> Iterator[Reading]:
    for k, part in enumerate(problem.parts):
        counts: dict[str, int] = {}
        for layer in range(part.first, part.first + part.count):
            for name, source in zip(part.model.borders, problem.graph.layers[layer].inputs, strict=True):
                if source.layer is None and source.name == arrival:
                    counts[name] = counts.get(name, 0) + 1
        for name, count in counts.items():
            for use in part.model.uses.get(name, ()):
                yield Reading(part=k, name=name, use=use, copies=count)


def _last(problem: Assembly, reading: Reading) -> int:
    """The last point that needs it without a recompute: in the first of the part's layers, whose backward runs last."""
    part = problem.parts[reading.part]
    if reading.use.backward is not None and part.count > 1:
        return part.span[1]
    return max(part.point(span[1]) for span in reading.use.spans)


def _recomputed(problem: Assembly, reading: Reading) -> int:
    """The last point that needs it for a recompute; -1 if there is none."""
    part = problem.parts[reading.part]
    if reading.use.forward is None:
        return -1
    return part.span[1] if part.count > 1 else part.again(reading.use.forward[1])


def _options(problem: Assembly, reading: Reading) -> tuple[Option, ...]:
    return problem.parts[reading.part].model.options[reading.use.group]


def _value(problem: Assembly, reading: Reading) -> Value:
    return problem.parts[reading.part].model.values[reading.name]
