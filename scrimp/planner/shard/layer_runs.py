"""Groups a run of identical layers into parts of 12, 6, 3, 2 and 1 layers; the layers of a part choose together.

With halving sizes, any number of a run's layers can choose one option and the rest another, and the number of choices is the
logarithm of the run's length. The last part is a single layer: its points are the run's worst, because the activations of all
other layers are held then. Points are schedule steps: three for each operator of each part's last layer, while tensors are
resharded for it, while it runs, and while a gradient that it made is reduced; first the forward's in order, then the backward's
with the parts in reverse order. Before the backward of each part come its forward operators once more, for its recompute.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from scrimp.capture import Graph
from scrimp.planner.shard.layer_model import LayerModel

POINTS = 3  # of each operator


@dataclass(frozen=True, kw_only=True)
class Part:
    """`count` layers from `first` on that choose together. `forward` and `backward`: the first points of its operators."""

    model: LayerModel
    first: int
    count: int
    forward: int
    backward: int

    @property
    def last(self) -> int:
        return self.first + self.count - 1

    def point(self, op: int) -> int:
        """The point at which an operator runs; the one before it is for resharding, the one after it for gradients."""
        ahead = self.model.forward_ops
        return (self.forward + POINTS * op if op < ahead else self.backward + POINTS * (op - ahead)) + 1

    def again(self, op: int) -> int:
        """The point at which a forward operator is recomputed, before the part's backward."""
        return self.backward - POINTS * (self.model.forward_ops - op) + 1

    @property
    def span(self) -> tuple[int, int]:
        """From its first operator to its last."""
        return self.forward, self.backward + POINTS * (len(self.model.graph.ops) - self.model.forward_ops) - 1


def names_of_points(graph: Graph, parts: Sequence[Part]) -> tuple[str, ...]:
    """The layer and the operator at each point, as text."""
    names: dict[int, str] = {}
    for part in parts:
        path = graph.layers[part.last].path or "the model"
        for index, op in enumerate(part.model.graph.ops):
            what = f"{op.target}{', backward' if op.backward else ''}"
            points = {part.point(index): what}
            if not op.backward:
                points[part.again(index)] = f"{op.target}, recomputed"
            for point, words in points.items():
                names[point - 1], names[point] = f"{path}, resharding for {words}", f"{path}, {words}"
                names[point + 1] = f"{path}, gradients of {words}"
    return tuple(names[point] for point in range(len(names)))


def halves(length: int) -> tuple[int, ...]:
    """Sizes of the parts: 24 is 12, 6, 3, 2, 1."""
    sizes = []
    while length > 1:
        sizes.append(length // 2)
        length -= length // 2
    return (*sizes, 1) if length == 1 else tuple(sizes)


def parts_of(graph: Graph, models: Sequence[LayerModel], *, together: bool = False) -> tuple[Part, ...]:
    """`together`: all layers of a run but its last choose as one, which is enough for a lower bound."""
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
    starts = [POINTS * sum(ahead[:k]) for k in range(len(groups))]
    behind = [POINTS * (sum(ahead) + ahead[k] + sum(total[k + 1 :])) for k in range(len(groups))]
    return tuple(
        Part(model=models[graph.layers[first].graph], first=first, count=count, forward=starts[k], backward=behind[k])
        for k, (first, count) in enumerate(groups)
    )
