"""Lowers a model: layer after layer forward, then backward; what leaves one layer is what the next one gets.

Equal layers share one program: the same choices, and the same placements of what arrives.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from scrimp.capture import BUFFER, Graph, Source
from scrimp.errors import RunError
from scrimp.layout import Mesh
from scrimp.lower.choice import ChosenLayer, chosen_layers
from scrimp.lower.layer import ahead, behind
from scrimp.lower.rest import Rest, rest_of
from scrimp.lower.steps import Ahead, Behind
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


@dataclass(frozen=True, kw_only=True)
class Lowered:
    """`rest`: of each parameter; `batch`: the placement of each tensor of the batch; `loss`: where the loss is. Of a piece of a
    pipeline: `first` is the number of its first layer, `batch` has its inputs from other pieces too, `gradients` has the
    placements in which their gradients leave, and `loss` is None unless this piece makes it."""

    graph: Graph
    mesh: Mesh
    layers: tuple[LoweredLayer, ...]
    rest: Mapping[str, Rest]
    batch: Mapping[str, Placed]
    loss: Source | None
    first: int = 0
    gradients: Mapping[str, Placed] = field(default_factory=dict)

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
    return lower_layers(graph, layers, plan.mesh, rest_of_layers(layers, graph, plan.mesh), batch)


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
        weights.append({name: rest[of].use if of in rest else _whole(chosen, name) for name, of in names.items()})
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


def _whole(chosen: ChosenLayer, name: str) -> Placed:
    assert chosen.values[name].kind == BUFFER or name not in chosen.model.weights, name
    return unsplit(chosen.values[name].shape)
