"""Lowers a model: layer after layer forward, then backward; what leaves one layer is what the next one gets.

Equal layers share one program: the same choices, and the same placements of what arrives.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from scrimp.capture import BUFFER, Graph, Source
from scrimp.layout import Mesh
from scrimp.lower.choice import ChosenLayer, chosen_layers
from scrimp.lower.layer import ahead, behind
from scrimp.lower.rest import Rest, rest_of
from scrimp.lower.steps import Accumulate, Ahead, Behind, Gather, read
from scrimp.lower.verify import verify, verify_fingerprint
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
    """`rest`: of each parameter; `batch`: the placement of each tensor of the batch; `loss`: where the loss is, and how.
    `gradients`: of each trained parameter the axes along which its gradient arrives as a partial sum, one entry for each layer
    that brings a summand; None where that is not in the weight's placement."""

    graph: Graph
    mesh: Mesh
    layers: tuple[LoweredLayer, ...]
    rest: Mapping[str, Rest]
    batch: Mapping[str, Placed]
    loss: Source

    @cached_property
    def gradients(self) -> Mapping[str, tuple[tuple[str, ...] | None, ...]]:
        found: dict[str, tuple[tuple[str, ...] | None, ...]] = {}
        for layer in self.layers:
            for step in layer.behind.steps:
                if isinstance(step, Accumulate):
                    name = layer.names[step.weight]
                    as_used = step.before.dims == self.rest[name].use.dims
                    found[name] = (*found.get(name, ()), step.before.partial if as_used else None)
        return found

    def later(self, name: str, *, accumulated: bool) -> tuple[str, ...]:
        """`Rest.later` of a parameter."""
        partial = {*self.gradients[name]}
        return self.rest[name].later(next(iter(partial)) if len(partial) == 1 else None, accumulated=accumulated)

    @property
    def programs(self) -> int:
        """How many different programs there are, of forwards and of backwards."""
        return len({id(layer.ahead) for layer in self.layers}) + len({id(layer.behind) for layer in self.layers})


def lower(plan: Plan, graph: Graph) -> Lowered:
    """Raises `RunError` if the plan was not made for this graph."""
    verify(plan, graph)
    layers, mesh = chosen_layers(plan, graph), plan.mesh
    verify_fingerprint(plan, graph)
    rest = _rest(layers, graph, mesh)
    batch = {each.name: Placed(each.factors) for each in plan.batch}
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
    arriving: dict[tuple[int | None, str], Placed] = {}
    readers = Counter((source.layer, source.name) for layer in graph.layers for source in layer.inputs)
    if graph.loss.layer is not None:
        arriving[graph.loss.layer, graph.loss.name] = made[graph.loss.layer, graph.loss.name].complete()
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
            if source.layer is not None:
                place = back.slots[slot].place
                several = readers[source.layer, source.name] > 1
                arriving.setdefault((source.layer, source.name), place.complete() if several else place)
    return Lowered(
        graph=graph, mesh=mesh, layers=tuple(LoweredLayer(**each) for each in found), rest=rest, batch=batch, loss=graph.loss
    )


def _rest(layers: tuple[ChosenLayer, ...], graph: Graph, mesh: Mesh) -> dict[str, Rest]:
    """By the choice of the first layer that uses the weight. Every rank holds all of a weight that no operator uses."""
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
    for name, each in known.items():
        if name not in found:
            level = (0,) * len(mesh.names)
            found[name] = rest_of(name, each.shape, each.dtype, unsplit(each.shape), level, mesh, trained=each.trained)
    return found


def placed_weights(chosen: ChosenLayer, names: Mapping[str, str], rest: Mapping[str, Rest]) -> dict[str, Placed]:
    """Where the parameters and buffers of a layer are in use, by their names in its graph."""
    return {name: rest[of].use if of in rest else _whole(chosen, name) for name, of in names.items()}


def _whole(chosen: ChosenLayer, name: str) -> Placed:
    assert chosen.values[name].kind == BUFFER or name not in chosen.model.weights, name
    return unsplit(chosen.values[name].shape)
