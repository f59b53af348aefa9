"""A piece (model chunk): consecutive layers, and the tensors that they exchange with other pieces."""

from __future__ import annotations

from dataclasses import dataclass, replace

from scrimp.capture import Graph, Source, Value


@dataclass(frozen=True, kw_only=True)
class Relay:
    """A tensor that an earlier piece makes and a later one uses is relayed by all pieces between: `forward`, unless this piece
    uses it too and so holds it anyhow; `gradient`: its gradient comes back the same way."""

    value: Value
    forward: bool
    gradient: bool


@dataclass(frozen=True, kw_only=True)
class Piece:
    """The layers from `first` to `stop` - 1. In `graph` they are numbered from 0; an input from an earlier piece is a source
    without a layer, by a name in `arrivals`. `departures`: outputs (layer, name) that later pieces use. `relays`: tensors only
    passed on. `shared`: parameters that other pieces use too."""

    first: int
    stop: int
    graph: Graph
    arrivals: tuple[str, ...]
    departures: frozenset[tuple[int, str]]
    relays: tuple[Relay, ...] = ()
    shared: frozenset[str] = frozenset()

    @property
    def kind(self) -> tuple[object, ...]:
        """Pieces of one kind have the same planning problem, whatever their names and position."""

        def slot(source: Source) -> tuple[int | None, object]:
            outside = source.layer is None and source.name in self.arrivals
            return source.layer, self.arrivals.index(source.name) if outside else source.name

        made = tuple((layer.graph, tuple(map(slot, layer.inputs))) for layer in self.graph.layers)
        shared = tuple(k for k, layer in enumerate(self.graph.layers) if any(name in self.shared for _, name in layer.parameters))
        relays = tuple((relay.value.shape, relay.value.dtype, relay.forward, relay.gradient) for relay in self.relays)
        return (made, self.departures, relays, shared)


def piece(graph: Graph, first: int, stop: int) -> Piece:
    inside = range(first, stop)
    layers, batch = [], set()
    arrivals: dict[str, None] = {}  # in the order of their first use
    for layer in (graph.layers[k] for k in inside):
        inputs = []
        for source in layer.inputs:
            if source.layer is None:
                batch.add(source.name)
                inputs.append(source)
            elif source.layer in inside:
                inputs.append(Source(layer=source.layer - first, name=source.name))
            else:
                inputs.append(Source(layer=None, name=f"{source.layer}:{source.name}"))
                arrivals[inputs[-1].name] = None
        layers.append(replace(layer, inputs=tuple(inputs)))
    behind = {source for layer in graph.layers[stop:] for source in layer.inputs if source.layer is not None}
    departures = frozenset((source.layer - first, source.name) for source in behind if source.layer in inside)  # type: ignore[operator]
    passing = sorted(
        (source for source in behind if source.layer is not None and source.layer < first),
        key=lambda each: (each.layer, each.name),
    )
    relays = [_relay(graph, source, f"{source.layer}:{source.name}" not in arrivals) for source in passing]
    mine = {name for k in inside for _, name in graph.layers[k].parameters}
    others = {name for k, layer in enumerate(graph.layers) if k not in inside for _, name in layer.parameters}
    return Piece(
        first=first,
        stop=stop,
        graph=replace(graph, layers=tuple(layers), batch=tuple(value for value in graph.batch if value.name in batch)),
        arrivals=tuple(arrivals),
        departures=departures,
        relays=tuple(relay for relay in relays if relay.forward or relay.gradient),
        shared=frozenset(mine & others),
    )


def _relay(graph: Graph, source: Source, forward: bool) -> Relay:
    assert source.layer is not None
    made = graph.graphs[graph.layers[source.layer].graph]
    value = next(value for value in made.values if value.name == source.name)
    return Relay(value=value, forward=forward, gradient=source.name in dict(made.tangents))
