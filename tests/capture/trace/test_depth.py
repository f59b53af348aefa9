"""Few layers of a deep model are traced: what comes of it is what comes of all of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from scrimp import zoo
from scrimp.capture import Graph, capture
from scrimp.capture import _capture as module
from scrimp.capture.graph.json import to_json
from scrimp.capture.trace.depth import Run, runs_of

DEPTH = 8


def whole(model: nn.Module, args: Any, kwargs: Any = None) -> Graph:
    """All layers traced."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "runs_of", lambda model: ())
        return capture(model, args, kwargs)


def renamed(graph: Graph) -> str:
    """What comes in from other layers is called after where the trace saw it first: here by its place."""
    text = []
    for each in graph.graphs:
        borders = [value.name for value in each.values if value.kind == "border" and value.name not in _batch(graph)]
        one = to_json(replace(graph, graphs=(each,), layers=()))
        for k, name in enumerate(borders):
            one = one.replace(f'"{name}"', f'"border.{k}"')
        text.append(one)
    return "\n".join([*text, to_json(replace(graph, graphs=()))])


def _batch(graph: Graph) -> set[str]:
    return {value.name for value in graph.batch}


@pytest.mark.parametrize(
    "name", ["gpt-tiny", "vit-tiny", *(pytest.param(n, marks=pytest.mark.full) for n in ("llama-tiny", "bert-tiny"))]
)
def test_models_of_the_zoo(name: str) -> None:
    with torch.device("meta"):
        model = zoo.build(name, layers=DEPTH)
    assert runs_of(model) == (Run(path="blocks", first=0, count=DEPTH),)
    batch = tuple(zoo.example_batch(name, 2, layers=DEPTH))
    found = capture(model, batch)
    assert [layer.path for layer in found.layers if layer.path.startswith("blocks")] == [f"blocks.{k}" for k in range(DEPTH)]
    assert renamed(found) == renamed(whole(model, batch))
    assert len(model.blocks) == DEPTH  # type: ignore[arg-type]


class Block(nn.Module):
    def __init__(self, number: int, scale: float = 1.0) -> None:
        super().__init__()
        self.linear, self.number, self.scale = nn.Linear(4, 4), number, scale

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.linear(x).relu()


class Stack(nn.Module):
    def __init__(self, blocks: list[nn.Module], how: str = "in turn") -> None:
        super().__init__()
        self.layers, self.how = nn.ModuleList(blocks), how

    def forward(self, x: Tensor) -> Tensor:
        seen = []
        for k in range(len(self.layers)) if self.how != "by number" else range(DEPTH):
            x = self.layers[k](x)
            seen.append(x)
        if self.how == "all read":
            x = torch.stack(seen).sum(0)
        if self.how == "first read":
            x = x + seen[0]
        return x.square().mean()


BATCH = (torch.randn(3, 4),)


def test_a_number_of_its_own_is_no_difference() -> None:
    model = Stack([Block(k) for k in range(DEPTH)])
    assert runs_of(model) == (Run(path="layers", first=0, count=DEPTH),)
    assert renamed(capture(model, BATCH)) == renamed(whole(model, BATCH))


def test_a_run_within_a_list() -> None:
    model = Stack([Block(0, scale=2.0), *(Block(k) for k in range(1, DEPTH)), Block(DEPTH, scale=3.0)])
    assert runs_of(model) == (Run(path="layers", first=1, count=DEPTH - 1),)
    assert renamed(capture(model, BATCH)) == renamed(whole(model, BATCH))


@pytest.mark.parametrize("how", ["all read", "first read", "by number"])
def test_what_is_not_used_alike_is_traced_whole(how: str) -> None:
    model = Stack([Block(k) for k in range(DEPTH)], how)
    assert runs_of(model)
    assert renamed(capture(model, BATCH)) == renamed(whole(model, BATCH))


def test_what_is_not_alike() -> None:
    assert runs_of(Stack([Block(k, scale=1.0 + k) for k in range(DEPTH)])) == ()
    assert runs_of(Stack([Block(0)] * DEPTH)) == ()
    assert runs_of(Stack([Block(k) for k in range(5)])) == ()  # not worth it
    tied = [Block(k) for k in range(DEPTH)]
    tied[5].linear.weight = tied[2].linear.weight
    assert runs_of(Stack([*tied])) == ()
