"""The peak of a stage once more: every task of its schedule, every operator of every layer, from the plan's layouts alone.

For plans that keep everything. What is in flight is counted by walking the schedule; weights that are gathered are left out.
"""

from __future__ import annotations

from math import prod

from scrimp import Plan
from scrimp.capture import Graph
from scrimp.layout import Layout
from scrimp.planner.pipeline.schedule import tasks

ITEMSIZE = {"bfloat16": 2, "float32": 4, "int64": 8, "bool": 1}
BYTES = {"bf16": (2, 2, 12), "megatron-bf16": (2, 4, 12)}  # weight, gradient, states, with gradients that are summed up
Key = tuple[int, str]


class Walk:
    """One piece: its storages by layer and name, with bytes, and when they are there in the forward and in the backward."""

    def __init__(self, plan: Plan, graph: Graph, stage: int, first: int, stop: int) -> None:
        self.plan, self.graph, self.first, self.stop = plan, graph, first, stop
        self.sizes = dict(plan.mesh.axes)
        assert plan.schedule is not None
        self.received = dict(plan.schedule.stages[stage].received)
        layers = [layer for layers in plan.layers for layer in [layers] * layers.count]
        self.planned = {k: {op.name: op for op in layers[k].ops} for k in range(first, stop)}
        self.groups = self._groups(stage)
        self.forward = [(k, op) for k in range(first, stop) for op in self._graph(k).ops if not op.backward]
        self.backward = [(k, op) for k in reversed(range(first, stop)) for op in self._graph(k).ops if op.backward]
        self.turn = len(self.forward)
        self.end = self.turn + len(self.backward)
        self.spans: list[tuple[int, int, int]] = []  # in the piece's own time
        self.saved = 0  # what a micro-batch has between its forward and its backward
        self.always = 0  # buffers to land in
        self.away = 0  # what is being sent, while other pieces run
        self._walk()

    def _graph(self, k: int):  # type: ignore[no-untyped-def]
        return self.graph.graphs[self.graph.layers[k].graph]

    def _groups(self, stage: int) -> dict[int, dict[str, int]]:
        """Who shares a copy."""
        assert self.plan.schedule is not None
        planned, _ = self.plan.schedule.stages[stage].source
        at = [piece.first for piece in planned.pieces].index(self.first)
        found = {}
        for part in planned.assemblies[at].parts:
            names = {part.model.graph.ops[m.op].name: g for g, group in enumerate(part.model.groups) for m in group.members}
            found |= {self.first + k: names for k in range(part.first, part.first + part.count)}
        return found

    def local(self, shape: tuple[int, ...], dtype: str, layout: str) -> int:
        split = prod(self.sizes[axis] for dim in Layout.parse(layout).dims for axis in dim)
        return prod(shape) * ITEMSIZE[dtype] // split

    def origin(self, k: int, name: str) -> Key:
        its = self._graph(k)
        kinds = {value.name: value.kind for value in its.values}
        borders = [each for each in its.inputs if kinds[each] == "border"]
        if name in borders:
            source = self.graph.layers[k].inputs[borders.index(name)]
            if source.layer is None:
                return -1, name
            return self.origin(source.layer, source.name) if source.layer >= self.first else (source.layer, source.name)
        output = {incoming: output for output, incoming in its.tangents}.get(name)
        if output is None or k + 1 == len(self.graph.layers):
            return k, name
        if k + 1 == self.stop:
            return self.stop, output
        behind = self._graph(k + 1)
        kinds = {value.name: value.kind for value in behind.values}
        inputs = [each for each in behind.inputs if kinds[each] == "border"]
        at = next(j for j, source in enumerate(self.graph.layers[k + 1].inputs) if (source.layer, source.name) == (k, output))
        return k + 1, dict(behind.gradients)[inputs[at]]

    def _walk(self) -> None:
        born: dict[Key, int] = {}
        last: dict[Key, int] = {}
        nbytes: dict[Key, int] = {}
        made_as: dict[Key, str] = {}
        shapes: dict[Key, tuple[tuple[int, ...], str, Key]] = {}
        copies: dict[tuple[Key, str, bool, int, int], tuple[int, int, int]] = {}
        for at, (k, op) in enumerate((*self.forward, *self.backward)):
            values = {value.name: value for value in self._graph(k).values}
            outputs = (name for name in op.outputs if name is not None)
            for name, layout in zip(outputs, self.planned[k][op.name].outputs, strict=True):
                value = values[name]
                made_as[k, name] = layout
                shapes[k, name] = value.shape, value.dtype, (k, value.storage)
                if value.storage == name:
                    born[k, name] = last[k, name] = at
                    nbytes[k, name] = self.local(value.shape, value.dtype, layout)
            for name, layout in zip(op.inputs, self.planned[k][op.name].inputs, strict=True):
                source = self.origin(k, name)
                outside = source[0] >= 0 and not self.first <= source[0] < self.stop
                if outside and source not in made_as:
                    landed = f"gradient {self.stop - 1}:{source[1]}" if op.backward and source[0] >= self.stop else None
                    made_as[source] = self.received[landed or f"input {source[0]}:{source[1]}"]
                    shapes[source] = values[name].shape, values[name].dtype, source
                    born[source] = self.turn if landed else 0
                    nbytes[source] = self.local(values[name].shape, values[name].dtype, made_as[source])
                    self.always += nbytes[source]
                if source not in made_as:
                    continue  # a weight, or of the batch
                shape, dtype, root = shapes[source]
                if root in nbytes:
                    last[root] = at
                before = Layout.parse(made_as[source])
                if Layout(dims=before.dims, factors=before.factors) != Layout.parse(layout):
                    key = (source, layout, op.backward, k, self.groups[k][op.name])
                    copies[key] = (copies.get(key, (at, at, 0))[0], at, self.local(shape, dtype, layout))
        for key, begin in born.items():
            if begin < self.turn <= last[key]:
                self.saved += nbytes[key]
            self.spans.append((begin, last[key], nbytes[key]))
        self.spans += copies.values()
        for key, backward in self._sent():
            root = shapes[key][2]
            self.away += nbytes[root]
            self.spans.append((last[root] + 1, self.end - 1, nbytes[root]))
            if backward:
                self.spans.append((0, self.turn - 1, nbytes[root]))

    def _sent(self) -> list[tuple[Key, bool]]:
        found: list[tuple[Key, bool]] = []
        if self.stop < len(self.graph.layers):
            for source in self.graph.layers[self.stop].inputs:
                if source.layer == self.stop - 1:
                    found.append(((self.stop - 1, source.name), False))
        if self.first > 0:
            its = self._graph(self.first)
            kinds = {value.name: value.kind for value in its.values}
            borders = [each for each in its.inputs if kinds[each] == "border"]
            for name, source in zip(borders, self.graph.layers[self.first].inputs, strict=True):
                if source.layer == self.first - 1 and name in dict(its.gradients):
                    found.append(((self.first, dict(its.gradients)[name]), True))
        return found

    def at(self, time: int) -> int:
        return sum(nbytes for begin, end, nbytes in self.spans if begin <= time <= end)


def weights_nbytes(plan: Plan, graph: Graph, pieces: tuple[tuple[int, int], ...]) -> int:
    """A weight counts once on a device, whatever uses it."""
    sizes, total = dict(plan.mesh.axes), 0
    shapes = {each.name: each.shape for each in graph.parameters}
    for first, stop in pieces:
        seen = set()
        for layers in plan.layers:
            if not first <= layers.first < stop:
                continue
            for weight in layers.weights:
                if weight.name in seen:
                    continue
                seen.add(weight.name)
                used = prod(shapes[weight.name]) // prod(sizes[a] for dim in Layout.parse(weight.layout).dims for a in dim)
                axes = (weight.weight_axes, weight.gradient_axes, weight.state_axes)
                for each, over in zip(BYTES[plan.precision], axes, strict=True):
                    total += layers.count * each * -(-used // prod(sizes[axis] for axis in over))
    return total


def recounted(plan: Plan, graph: Graph, stage: int) -> int:
    assert plan.schedule is not None
    stages, pieces = len(plan.schedule.stages), plan.schedule.stages[stage].pieces
    walks = [Walk(plan, graph, stage, first, stop) for first, stop in pieces]
    fixed = weights_nbytes(plan, graph, pieces) + sum(walk.always for walk in walks)
    flying: list[set[int]] = [set() for _ in walks]
    peak = 0
    for task in tasks(stage, stages, plan.schedule.micro_batches, len(pieces)):
        chunk = task.piece // stages
        flying[chunk].discard(task.micro)  # it is looked at in its own time
        others = sum(len(flying[k]) * walk.saved + (k != chunk) * walk.away for k, walk in enumerate(walks))
        walk = walks[chunk]
        times = range(walk.turn, walk.end) if task.backward else range(walk.turn)
        peak = max(peak, fixed + others + max(map(walk.at, times)))
        if not task.backward:
            flying[chunk].add(task.micro)
    return peak
