"""The layers of a captured model with their sharding options on a mesh, all of them or a subset.

Groups do not depend on the mesh, options do. Results are cached per mesh, because a search builds many assemblies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cached_property

from scrimp._arguments import WAYS
from scrimp.capture import Graph
from scrimp.cluster import Cluster
from scrimp.layout import Mesh
from scrimp.planner.cost.greedy_move import AxisWise
from scrimp.planner.cost.move_tables import Moves
from scrimp.planner.cost.zero_levels import Precision
from scrimp.planner.formulation.assembly import Assembly, Rates
from scrimp.planner.shard.layer_model import LayerModel, model_of
from scrimp.planner.shard.layer_runs import Part, parts_of
from scrimp.planner.shard.options import Option, Split, option, splits
from scrimp.rules import rule_of

Narrow = Callable[[Graph, Mesh, list[LayerModel]], list[LayerModel]]
Looked = tuple[tuple[tuple[Split, ...], ...], ...]  # splits by class of layers, and by group


class Layers:
    """`models`: of each class of layers, without options."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.models: list[LayerModel] = []
        for layer in graph.graphs:
            values = {value.name: value for value in layer.values}
            rules = {op.name: rule_of(op, values) for op in layer.ops}
            self.models.append(model_of(layer, rules))

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        return parts_of(self.graph, self.models)


class OnMesh:
    def __init__(self, layers: Layers, cluster: Cluster, mesh: Mesh) -> None:
        self.layers, self.mesh = layers, mesh
        here = cluster.on(mesh)
        hardware = here.hardware
        assert hardware is not None
        self.moves = Moves(AxisWise(mesh, here))
        self.rates = Rates(memory=hardware.memory_rate, host_link=hardware.host_rate)
        self._work = here.compute_seconds
        self._options: dict[tuple[int, int, Split], Option] = {}

    @cached_property
    def every(self) -> Looked:
        """All splits."""
        return tuple(tuple(tuple(splits(group, self.mesh)) for group in model.groups) for model in self.layers.models)

    def assembly(
        self,
        precision: Precision,
        ways: Sequence[str] = WAYS,
        looked: Looked | None = None,
        *,
        alone: bool = False,
        narrow: Narrow | None = None,
    ) -> Assembly:
        """The problem with the options of these splits, by default of all; `narrow` filters them. `alone`: for a lower bound."""
        models = [
            replace(model, options=tuple(tuple(self._allowed(k, g, each)) for g, each in enumerate(groups)))
            for k, (model, groups) in enumerate(zip(self.layers.models, looked or self.every, strict=True))
        ]
        graph = self.layers.graph
        if narrow is not None:
            models = narrow(graph, self.mesh, models)
        return Assembly(graph, parts_of(graph, models, together=alone), self.moves, precision, self.rates, ways, alone=alone)

    def _allowed(self, k: int, g: int, wanted: Iterable[Split]) -> Iterable[Option]:
        model = self.layers.models[k]
        for split in wanted:
            if (k, g, split) not in self._options:
                made = option(model.graph, model.groups[g], self.mesh, split, self._work, self.moves.seconds)
                self._options[k, g, split] = made
            yield self._options[k, g, split]
