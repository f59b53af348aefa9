"""One pipeline stage: the problem of one of its devices, and cheap lower bounds for it."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import prod

from scrimp._arguments import KEEP
from scrimp.capture import Graph
from scrimp.cluster import Link
from scrimp.move import ITEMSIZE
from scrimp.planner.cost.move_tables import Moves
from scrimp.planner.cost.zero_levels import Precision
from scrimp.planner.formulation.assembly import Assembly, Rates
from scrimp.planner.formulation.builder import BACKWARD, FORWARD, GRADIENT, INPUT, ONCE
from scrimp.planner.formulation.stage_boundary import Outside
from scrimp.planner.formulation.weight_nodes import second_uses
from scrimp.planner.pipeline.memory_states import Joined, joined, spans_of
from scrimp.planner.pipeline.schedule import Scene, Work, scenes, tasks
from scrimp.planner.shard.layer_model import LayerModel
from scrimp.planner.shard.layer_runs import parts_of
from scrimp.planner.shard.stage_subgraph import Piece
from scrimp.planner.solver.session import Session


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What all stages share. `models`: one per class of layers; `links`: from each stage to the next, from the last to the
    first."""

    graph: Graph
    models: tuple[LayerModel, ...]
    moves: Moves
    precision: Precision
    rates: Rates
    ways: Sequence[str]
    links: tuple[Link, ...]
    micro_batches: int
    interleave: int

    @property
    def stages(self) -> int:
        return len(self.links)

    @cached_property
    def scenes(self) -> tuple[tuple[Scene, ...], ...]:
        every = [tasks(stage, self.stages, self.micro_batches, self.interleave) for stage in range(self.stages)]
        return tuple(scenes(order, self.stages) for order in every)

    def flights(self, index: int) -> int:
        """The most micro-batches of a piece in flight at once."""
        return max(scene.flights[index // self.stages] for scene in self.scenes[index % self.stages])


class Stage:
    """The problem of one device of a stage."""

    def __init__(self, setup: Setup, stage: int, pieces: Sequence[Piece]) -> None:
        self.stage, self.pieces = stage, tuple(pieces)
        held = held_before(pieces)
        self.assemblies = [_assembly(setup, stage, each, held[k], first=k == 0) for k, each in enumerate(pieces)]
        sketches = [assembly.sketch for assembly in self.assemblies]
        turns = [assembly.turn for assembly in self.assemblies]
        self.joined = joined(sketches, turns, setup.scenes[stage], setup.micro_batches)
        _borrow(self.joined, self.assemblies, setup.micro_batches)
        self.problem = self.joined.sketch.problem()
        self.session = Session(self.problem)
        self._least: dict[tuple[str, float], tuple[float, float]] = {}

    def elsewhere(self, stage: int, pieces: Sequence[Piece]) -> Stage:
        """The same problem for other, identical layers."""
        made = copy.copy(self)
        made.stage, made.pieces, made.assemblies = stage, tuple(pieces), [*map(copy.copy, self.assemblies)]
        for assembly, each in zip(made.assemblies, pieces, strict=True):
            assembly.graph = each.graph
        return made

    def least(self, objective: str, limit: float, seconds: float, gap: float) -> tuple[float, float]:
        """The least peak, or the least seconds within a limit, and a lower bound of it."""
        if (objective, limit) not in self._least:
            found = self.session.minimise(objective, limit=limit, seconds=seconds, gap=gap).phase
            self._least[objective, limit] = found.value, found.bound
        return self._least[objective, limit]

    def works(self, choice: Sequence[int]) -> list[Work]:
        return [
            Work(
                forward=assembly.sketch.seconds(each, FORWARD),
                backward=assembly.sketch.seconds(each, BACKWARD),
                input_transfer=assembly.sketch.seconds(each, INPUT),
                gradient_transfer=assembly.sketch.seconds(each, GRADIENT),
            )
            for assembly, each in zip(self.assemblies, self.joined.choices(choice), strict=True)
        ]

    def once_seconds(self, choice: Sequence[int]) -> float:
        every = zip(self.assemblies, self.joined.choices(choice), strict=True)
        return sum(assembly.sketch.seconds(each, ONCE) for assembly, each in every)


def held_before(pieces: Sequence[Piece]) -> tuple[frozenset[str], ...]:
    """For each piece of a stage the parameters that it uses and that an earlier one holds."""
    names = [{name for layer in each.graph.layers for _, name in layer.parameters} for each in pieces]
    return tuple(frozenset(mine & set().union(*names[:k])) for k, mine in enumerate(names))


def _assembly(setup: Setup, stage: int, each: Piece, held: frozenset[str], *, first: bool) -> Assembly:
    ends = max(setup.links, key=lambda link: (link.latency_seconds, -link.bytes_per_second))
    outside = Outside(
        arrivals=each.arrivals, departures=each.departures, relays=each.relays, shared=each.shared, held=held,
        first=first, ahead=setup.links[stage - 1], behind=setup.links[stage], far=ends,
    )  # fmt: skip
    return Assembly(
        each.graph, parts_of(each.graph, setup.models), setup.moves, setup.precision, setup.rates, setup.ways,
        outside=outside, accumulated=setup.micro_batches > 1,
    )  # fmt: skip


class Floors:
    """Lower bounds per device, as prefix sums over layers: `fixed` bytes, bytes `saved` per micro-batch, and seconds of
    `work`."""

    def __init__(self, setup: Setup) -> None:
        devices, layers = setup.moves.mesh.size, range(len(setup.graph.layers))
        seen: set[str] = set()
        self.fixed = [*accumulate((_weights_nbytes(setup, k, seen) / devices for k in layers), initial=0.0)]
        self.saved = [*accumulate((_saved_nbytes(setup, k) / devices for k in layers), initial=0.0)]
        self.work = [*accumulate((_least_seconds(setup, k) for k in layers), initial=0.0)]

    def nbytes(self, first: int, stop: int, flights: int) -> float:
        return self.fixed[stop] - self.fixed[first] + flights * (self.saved[stop] - self.saved[first])

    def seconds(self, first: int, stop: int) -> float:
        return self.work[stop] - self.work[first]


def _weights_nbytes(setup: Setup, k: int, seen: set[str]) -> int:
    """A tied weight counts with the first layer that uses it."""
    layer, numbers = setup.graph.layers[k], setup.precision
    model, named = setup.models[layer.graph], dict(layer.parameters)
    trained = {name for name, _ in model.graph.gradients}
    new = [name for name in model.weights if named[name] not in seen]
    seen |= {named[name] for name in new}
    return sum(
        (numbers.weight + (numbers.gradient + numbers.states if name in trained else 0)) * prod(model.values[name].shape)
        for name in new
    )


def _saved_nbytes(setup: Setup, k: int) -> int:
    """Zero unless every activation must be kept."""
    if {*setup.ways} != {KEEP}:
        return 0
    model = setup.models[setup.graph.layers[k].graph]
    leaving = {model.values[name].storage for name in (*model.graph.outputs, *(g for _, g in model.graph.gradients))}
    return sum(
        prod(model.values[root].shape) * ITEMSIZE[model.values[root].dtype]
        for root, (first, last) in model.lives.items()
        if first < model.forward_ops <= last and root not in leaving
    )


def _least_seconds(setup: Setup, k: int) -> float:
    model = setup.models[setup.graph.layers[k].graph]
    return setup.micro_batches * sum(min(option.seconds for option in options) for options in model.options)


def _borrow(whole: Joined, pieces: Sequence[Assembly], micro_batches: int) -> None:
    """Adds the second uses of weights that an earlier piece of the stage holds."""
    for q, piece in enumerate(pieces):
        for weight, user, as_name in piece.borrowed:
            p = next(p for p, other in enumerate(pieces) if weight in other.owners)
            for each in second_uses(pieces[p], *pieces[p].owners[weight], piece, user, as_name):
                pair = (whole.starts[p] + each.nodes[0], whole.starts[q] + each.nodes[1])
                for when, seconds in each.spent:
                    whole.sketch.pair_cost(*pair, micro_batches * seconds, when)
                for local, kind, nbytes in each.holds:
                    for span, times in spans_of(local, q, [*whole.stretches]):
                        whole.sketch.pair_hold(*pair, *span, kind, times * nbytes)
