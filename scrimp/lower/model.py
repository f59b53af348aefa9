"""Lowers a model: layer after layer forward, then backward; what leaves one layer is what the next one gets.

Equal layers share one program: the same choices, and the same placements of what arrives.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from scrimp.capture import BUFFER, Graph, Source
from scrimp.errors import RunError
from scrimp.layout import Mesh
from scrimp.lower.choice import ChosenLayer, chosen_layers
from scrimp.lower.layer import ahead, behind
from scrimp.lower.steps import Accumulate, Ahead, Behind, Gather, read
from scrimp.lower.verify import verify, verify_fingerprint
from scrimp.lower.weights.rest import Rest, rest_of
from scrimp.planner import Placed, Plan, unsplit


@dataclass(frozen=True, kw_only=True)
class LoweredLayer:
    """`names`: the model's name of each parameter and buffer of the layer's graph. `sources`: where its inputs come from.
    `readers`: for each output, which layers read it, in forward order."""

    path: str
    chosen: ChosenLayer
    ahead: Ahead
    behind: Behind
    names: Mapping[str, str]
    sources: tuple[tuple[str, Source], ...]
    arrives: tuple[tuple[str, Placed], ...]  # gradients of outputs: the placement in which they are summed

    @cached_property
    def read_late(self) -> frozenset[str]:
        """Weights that the backward still reads, or gathers, when it has made their gradient."""
        made: set[str] = set()
        late: set[str] = set()
        gathered: dict[int, str] = {}
        for step in self.behind.steps:
            if isinstance(step, Gather):
                gathered[step.target] = self.names[step.weight]
                late |= {self.names[step.weight]} & made
            storages = (self.behind.slots[slot].storage for slot in read(step))
            late |= {gathered[storage] for storage in storages if storage in gathered} & made
            if isinstance(step, Accumulate):
                made.add(self.names[step.weight])
        return frozenset(late)


@dataclass(frozen=True, kw_only=True)
class Lowered:
    """`rest`: of each parameter; `batch`: the placement of each tensor of the batch; `loss`: where the loss is. Of a piece of a
    pipeline: `first` is the number of its first layer, `batch` has its inputs from other pieces too, `gradients` has the
    placements in which their gradients leave, and `loss` is None unless this piece makes it. `partials`: of
    each trained parameter the axes along which its gradient arrives as a partial sum, one entry for each layer that brings a
    summand; None where that is not in the weight's placement."""

    graph: Graph
    mesh: Mesh
    layers: tuple[LoweredLayer, ...]
    rest: Mapping[str, Rest]
    batch: Mapping[str, Placed]
    loss: Source | None
    first: int = 0
    gradients: Mapping[str, Placed] = field(default_factory=dict)

    @cached_property
    def partials(self) -> Mapping[str, tuple[tuple[str, ...] | None, ...]]:
        found: dict[str, tuple[tuple[str, ...] | None, ...]] = {}
        for layer in self.layers:
            for step in layer.behind.steps:
                if isinstance(step, Accumulate):
                    name = layer.names[step.weight]
                    as_used = step.before.dims == self.rest[name].use.dims
                    found[name] = (*found.get(name, ()), step.before.partial if as_used else None)
        return found

    @cached_property
    def summands(self) -> Mapping[str, tuple[int, ...]]:
        """Of each parameter with a gradient, the numbers in the model of the layers that bring summands of it."""
        found: dict[str, tuple[int, ...]] = {}
        for k, layer in enumerate(self.layers):
            for step in layer.behind.steps:
                if isinstance(step, Accumulate):
                    name = layer.names[step.weight]
                    found[name] = (*found.get(name, ()), self.first + k)
        return found

    @property
    def programs(self) -> int:
        """How many different programs there are, of forwards and of backwards."""
        return len({id(layer.ahead) for layer in self.layers}) + len({id(layer.behind) for layer in self.layers})


def lower(plan: Plan, graph: Graph) -> Lowered:
    """Raises `RunError` if the plan was not made for this graph."""
    if plan.schedule is not None and len(plan.schedule.stages) > 1:
        raise RunError(f"the plan has {len(plan.schedule.stages)} pipeline stages: lower it with lower_stages")
    layers = verified(plan, graph)
    batch = {each.name: Placed(each.factors) for each in plan.batch}
    rest = rest_of_layers(layers, graph, plan.mesh)
    return lower_layers(graph, layers, plan.mesh, {**rest, **unused(graph, rest, plan.mesh)}, batch)


def unused(graph: Graph, used: Collection[str], mesh: Mesh) -> dict[str, Rest]:
    """Parameters that no operator uses: every rank holds all of them."""
    level = (0,) * len(mesh.names)
    return {
        each.name: rest_of(each.name, each.shape, each.dtype, unsplit(each.shape), level, mesh, trained=each.trained)
        for each in graph.parameters
        if not each.buffer and each.name not in used
    }


def verified(plan: Plan, graph: Graph) -> tuple[ChosenLayer, ...]:
    """The plan's choices for the layers of the graph. Raises `RunError` if it was not made for this graph."""
    verify(plan, graph)
    layers = chosen_layers(plan, graph)
    verify_fingerprint(plan, graph)
    return layers


def lower_layers(
    graph: Graph,
    layers: Sequence[ChosenLayer],
    mesh: Mesh,
    rest: Mapping[str, Rest],
    batch: Mapping[str, Placed],
    *,
    first: int = 0,
    arrivals: Collection[str] = (),
    tangents: Mapping[tuple[int | None, str], Placed] | None = None,
) -> Lowered:
    """Lowers layers whose inputs are in `batch`. Of a piece: `arrivals` are its inputs from other pieces, and `tangents` has the
    placements in which gradients of its outputs arrive from them."""
    found: list[dict[str, Any]] = []
    fronts: dict[Any, Ahead] = {}
    backs: dict[Any, Behind] = {}
    made: dict[tuple[int | None, str], Placed] = {(None, name): place for name, place in batch.items()}
    weights: list[dict[str, Placed]] = []
    for k, (layer, chosen) in enumerate(zip(graph.layers, layers, strict=True)):
        names = dict(layer.parameters)
        sources = dict(zip(chosen.model.borders, layer.inputs, strict=True))
        borders = {name: made[source.layer, source.name] for name, source in sources.items()}
        weights.append(placed_weights(chosen, names, rest))
        key = (chosen.key, tuple(borders.items()), tuple(weights[-1].items()))
        if key not in fronts:
            fronts[key] = ahead(chosen, borders, weights[-1])
        front = fronts[key]
        made.update({(k, name): front.slots[slot].place for name, slot in front.outputs})
        found.append({"path": layer.path, "chosen": chosen, "ahead": front, "names": names, "sources": tuple(sources.items())})
    arriving: dict[tuple[int | None, str], Placed] = {**(tangents or {})}
    readers = Counter((source.layer, source.name) for layer in graph.layers for source in layer.inputs)
    loss = None
    if graph.loss.layer is not None and graph.loss.layer - first in range(len(layers)):
        loss = Source(layer=graph.loss.layer - first, name=graph.loss.name)
        arriving[loss.layer, loss.name] = made[loss.layer, loss.name].complete()
    for k in reversed(range(len(found))):
        chosen, front = found[k]["chosen"], found[k]["ahead"]
        arrives = {output: arriving.get((k, output), made[k, output].complete()) for output, _ in chosen.model.graph.tangents}
        met = (id(front), tuple(arrives.items()))
        if met not in backs:
            backs[met] = behind(chosen, front, arrives, weights[k])
        back = backs[met]
        found[k] |= {"behind": back, "arrives": tuple(arrives.items())}
        sources = dict(found[k]["sources"])
        for name, slot in back.gradients:
            source = sources[name]
            if source.layer is not None or source.name in arrivals:
                place = back.slots[slot].place
                several = source.layer is None or readers[source.layer, source.name] > 1
                arriving.setdefault((source.layer, source.name), place.complete() if several else place)
    return Lowered(
        graph=graph, mesh=mesh, layers=tuple(LoweredLayer(**each) for each in found), rest=rest, batch=batch, loss=loss,
        first=first, gradients={name: arriving[None, name] for name in arrivals if (None, name) in arriving},
    )  # fmt: skip


def later_axes(pieces: Sequence[Lowered], *, accumulated: bool) -> dict[str, tuple[str, ...]]:
    """`Rest.later` of each parameter, for a model or the pieces of it on one rank; those for which it is not empty."""
    found: dict[str, tuple[str, ...]] = {}
    for name, each in ((name, each) for piece in pieces for name, each in piece.rest.items()):
        partial = {axes for piece in pieces for axes in piece.partials.get(name, ())}
        axes = each.later(next(iter(partial)) if len(partial) == 1 else None, accumulated=accumulated)
        if axes:
            found[name] = axes
    return found


def rest_of_layers(layers: Sequence[ChosenLayer], graph: Graph, mesh: Mesh) -> dict[str, Rest]:
    """By the choice of the first layer that uses the weight."""
    known = {each.name: each for each in graph.parameters if not each.buffer}
    found: dict[str, Rest] = {}
    for layer, chosen in zip(graph.layers, layers, strict=True):
        for name, of in layer.parameters:
            if of in known and of not in found and name in chosen.weights:
                each = known[of]
                trained = each.trained
                found[of] = rest_of(
                    of, each.shape, chosen.values[name].dtype, chosen.weights[name], chosen.level(name), mesh, trained=trained
                )
    return found


def placed_weights(chosen: ChosenLayer, names: Mapping[str, str], rest: Mapping[str, Rest]) -> dict[str, Placed]:
    """Where the parameters and buffers of a layer are in use, by their names in its graph."""
    return {name: rest[of].use if of in rest else _whole(chosen, name) for name, of in names.items()}


def _whole(chosen: ChosenLayer, name: str) -> Placed:
    assert chosen.values[name].kind == BUFFER or name not in chosen.model.weights, name
    return unsplit(chosen.values[name].shape)
