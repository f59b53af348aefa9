"""The layers of a model as few as can be: a run of alike layers becomes groups of 12, 6, 3, 2 and 1 that choose together.

With groups whose sizes halve, any number of a run's layers can choose one thing and the rest another, and there are as many
choices as the logarithm of its length. The last group is a single layer: its points are the run's worst, for all the others'
activations are there. Points are moments: one for each operator of each group's last layer, the forward's in order, then the
backward's, in the order of the groups turned round; before the backward of each one more, when what was not kept is made again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from scrimp.capture import Graph
from scrimp.planner.shard.layer_model import LayerModel


@dataclass(frozen=True, kw_only=True)
class Part:
    """`count` layers from `first` on, that choose together. `forward` and `backward`: the first points of its operators."""

    model: LayerModel
    first: int
    count: int
    forward: int
    backward: int

    @property
    def last(self) -> int:
        return self.first + self.count - 1

    def point(self, op: int) -> int:
        ahead = self.model.forward_ops
        return self.forward + op if op < ahead else self.backward + op - ahead

    @property
    def again(self) -> int:
        """The moment before its backward."""
        return self.backward - 1

    @property
    def span(self) -> tuple[int, int]:
        """From its first operator to its last."""
        return self.forward, self.backward + len(self.model.graph.ops) - self.model.forward_ops - 1


def names_of_points(graph: Graph, parts: Sequence[Part]) -> tuple[str, ...]:
    """The layer that is looked at then, and what runs in it."""
    names: dict[int, str] = {}
    for part in parts:
        path = graph.layers[part.last].path or "the model"
        names[part.again] = f"{path}, its forward run again"
        for index, op in enumerate(part.model.graph.ops):
            names[part.point(index)] = f"{path}, {op.target}{', backward' if op.backward else ''}"
    return tuple(names[point] for point in range(len(names)))


def halves(length: int) -> tuple[int, ...]:
    """Sizes of groups: 24 is 12, 6, 3, 2, 1."""
    sizes = []
    while length > 1:
        sizes.append(length // 2)
        length -= length // 2
    return (*sizes, 1) if length == 1 else tuple(sizes)


def parts_of(graph: Graph, models: Sequence[LayerModel], *, together: bool = False) -> tuple[Part, ...]:
    """`together`: all layers of a run but its last choose as one, which is the least that can be asked of a bound."""
    groups: list[tuple[int, int]] = []  # the first layer, and how many
    layer = 0
    while layer < len(graph.layers):
        kind = graph.layers[layer].graph
        length = next((k for k, other in enumerate(graph.layers[layer:]) if other.graph != kind), len(graph.layers) - layer)
        sizes = ((length - 1, 1) if length > 1 else (1,)) if together else halves(length)
        for size in sizes:
            groups.append((layer, size))
            layer += size
    ahead = [models[graph.layers[first].graph].forward_ops for first, _ in groups]
    total = [len(models[graph.layers[first].graph].graph.ops) for first, _ in groups]
    starts = [sum(ahead[:k]) for k in range(len(groups))]
    behind = [sum(ahead) + 1 + sum(total[j] - ahead[j] + 1 for j in range(k + 1, len(groups))) for k in range(len(groups))]
    return tuple(
        Part(model=models[graph.layers[first].graph], first=first, count=count, forward=starts[k], backward=behind[k])
        for k, (first, count) in enumerate(groups)
    )
