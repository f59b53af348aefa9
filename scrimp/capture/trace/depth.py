"""Traces a deep model by a few of its layers: the first three and the last of a long run of identical ones.

Tracing time grows with the number of layers. Layers of an `nn.ModuleList` or `nn.Sequential` are identical if they have the same
modules, settings (except for their own number) and tensors of the same shapes. The trace shows whether they are also used alike:
the second and the third must be of one class and read the layer before in the same way, and no other layer may read one in the
middle of the run. If that does not hold, all layers are traced.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from scrimp.capture.graph.graph import Graph, Layer, Source

LONG, HEAD = 6, 3  # the length of a run that is worth it; layers kept of it besides the last


Look = list[Any]


@dataclass(frozen=True, kw_only=True)
class Run:
    """`count` identical children of a module, from `first` on."""

    path: str
    first: int
    count: int

    @property
    def left_out(self) -> range:
        return range(self.first + HEAD, self.first + self.count - 1)


def runs_of(model: nn.Module) -> tuple[Run, ...]:
    """One for each list of layers, none nested in another."""
    found: list[Run] = []
    for path, module in model.named_modules():
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and not any(_inside(path, run.path) for run in found):
            longest = max(_alike([_look(child) for child in module]), key=lambda run: run[1], default=(0, 0))
            if longest[1] >= LONG and not _shares([*module][longest[0] : sum(longest)]):
                found.append(Run(path=path, first=longest[0], count=longest[1]))
    return tuple(found)


@contextmanager
def shortened(model: nn.Module, runs: Sequence[Run]) -> Iterator[None]:
    """The model without the left-out layers; restores them at the end."""
    whole = [(module, dict(module._modules)) for module in (model.get_submodule(run.path) for run in runs)]
    try:
        for run, (module, children) in zip(runs, whole, strict=True):
            kept = [child for k, child in enumerate(children.values()) if k not in run.left_out]
            module._modules = {str(k): child for k, child in enumerate(kept)}
        yield
    finally:
        for module, children in whole:
            module._modules = children


def lengthened(graph: Graph, run: Run) -> Graph | None:
    """The graph with the left-out layers added; None if they cannot be inferred."""
    kept = [*range(run.first, run.first + HEAD), run.first + run.count - 1]
    places = [[k for k, layer in enumerate(graph.layers) if layer.path == f"{run.path}.{child}".lstrip(".")] for child in kept]
    begin = places[0][0] if places[0] else 0
    if places != [[begin + k] for k in range(len(kept))]:
        return None  # a layer of the model is not one of the graph
    second, third = graph.layers[begin + 1], graph.layers[begin + 2]
    middle, more = begin + HEAD - 1, len(run.left_out)
    if second.graph != third.graph or _seen(second, begin + 1) != _seen(third, begin + 2):
        return None
    inside = range(begin, begin + HEAD)
    if any(source.layer in inside for layer in graph.layers[begin + HEAD + 1 :] for source in layer.inputs):
        return None
    if any(
        source.layer in inside and source.layer != k - 1 for k in (*inside, begin + HEAD) for source in graph.layers[k].inputs
    ):
        return None

    def later(source: Source) -> Source:
        return source if source.layer is None or source.layer < middle else replace(source, layer=source.layer + more)

    def copied(k: int) -> Layer:
        old, new = third.path, f"{run.path}.{run.left_out[k]}".lstrip(".")
        return Layer(
            path=new,
            graph=third.graph,
            parameters=tuple((name, new + one[len(old) :] if _inside(one, old) else one) for name, one in third.parameters),
            inputs=tuple(replace(source, layer=middle + k) if source.layer == middle - 1 else source for source in third.inputs),
        )

    behind = [replace(layer, inputs=tuple(map(later, layer.inputs))) for layer in graph.layers[middle + 1 :]]
    return replace(graph, layers=(*graph.layers[: middle + 1], *map(copied, range(more)), *behind), loss=later(graph.loss))


def _seen(layer: Layer, index: int) -> Hashable:
    """A layer's sources relative to itself: the layer before, and others that are always the same."""
    return tuple((-1 if source.layer == index - 1 else source.layer, source.name) for source in layer.inputs)


def _alike(looks: Sequence[Look]) -> Iterator[tuple[int, int]]:
    """The start and length of each run."""
    first = 0
    for k in range(1, len(looks) + 1):
        if k == len(looks) or not _same(looks[first], first, looks[k], k):
            yield first, k - first
            first = k


def _look(child: nn.Module) -> Look:
    """All names, types, settings and shapes in it, in order."""
    found: Look = []
    for name, module in child.named_modules():
        found += [name, type(module)]
        for key, value in sorted(vars(module).items()):
            if isinstance(value, (bool, int, float, str)) or value is None:
                found += [key, type(value), value]
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            found += [key, None if tensor is None else (tuple(tensor.shape), tensor.dtype, tensor.requires_grad)]
    return found


def _same(one: Look, at: int, other: Look, there: int) -> bool:
    """Equal, except that each may contain its own number."""
    return len(one) == len(other) and all(a == b or (a, b) == (at, there) for a, b in zip(one, other, strict=True))


def _shares(children: Sequence[nn.Module]) -> bool:
    """Whether several of them share a tensor or a child."""
    seen: set[int] = set()
    for child in children:
        mine = {id(each) for each in _tensors(child)} | {id(child)}
        if seen & mine:
            return True
        seen |= mine
    return False


def _tensors(child: nn.Module) -> Iterator[Tensor]:
    yield from child.parameters()
    yield from child.buffers()


def _inside(path: str, outer: str) -> bool:
    return not outer or path == outer or path.startswith(f"{outer}.")
