"""A lowered layer as an `nn.Module`: outputs and gradients are those of the layer it replaces."""

from __future__ import annotations

import copy
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from torch import nn

from scrimp import Plan, RunError, plan, zoo
from scrimp.capture import Graph, to_json
from scrimp.ext.ranks import pool
from scrimp.lower import LayerModule, check, cut, lower, module
from scrimp.planner import Placed
from scrimp.planner.baselines.compare import baseline_plan
from tests.lower.test_interpret import model_of, planned
from tests.support.lowering.run import Ran, batch_of, drawn, plainly, worst_of
from tests.support.lowering.threads import ThreadRank, on_threads


@pytest.fixture(scope="module")
def alone() -> tuple[nn.Module, Plan]:
    torch.manual_seed(0)
    model = zoo.build("gpt-tiny")
    return model, plan(model, zoo.example_batch("gpt-tiny", 8), "1xCPU", mesh="x=1", precision="fp32", time_limit=1)


def test_one_rank_is_the_layer_itself(alone: tuple[nn.Module, Plan]) -> None:
    model, found = alone
    block, lowered = copy.deepcopy(model.blocks[1]), module(found, "blocks.1", model)
    assert {name: each.shape for name, each in lowered.named_parameters()} == {
        name: each.shape for name, each in block.named_parameters()
    }
    x = torch.randn(8, 32, 32)
    one, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    weight = torch.randn(8, 32, 32)
    for layer, given in ((block, one), (lowered, other)):
        for _ in range(2):  # gradients add up
            (layer(given) * weight).sum().backward()
    torch.testing.assert_close(other.grad, one.grad, rtol=1e-5, atol=1e-5)
    for name, each in block.named_parameters():
        torch.testing.assert_close(lowered.get_parameter(name).grad, each.grad, rtol=1e-5, atol=1e-4)


def test_its_weights_are_ordinary_parameters(alone: tuple[nn.Module, Plan]) -> None:
    """An optimizer updates them, `load_state_dict` fills them; the model's own weights stay as they are."""
    model, found = alone
    lowered, other = module(found, "blocks.0", model), module(found, "blocks.1", model)
    x = torch.randn(8, 32, 32)
    before = lowered(x).detach()
    lowered(x).square().sum().backward()
    torch.optim.SGD(lowered.parameters(), lr=0.1).step()
    assert not torch.equal(lowered(x), before)
    other.load_state_dict(lowered.state_dict(), assign=True)
    assert torch.equal(other(x), lowered(x))
    torch.testing.assert_close(model.blocks[0](x), before, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_it_gives_the_same_bits(alone: tuple[nn.Module, Plan]) -> None:
    """Alone, and as a graph break in a larger compiled model."""
    model, found = alone
    lowered = module(found, "blocks.1", model)
    compiled = torch.compile(lowered)
    larger = torch.compile(nn.Sequential(nn.Identity(), lowered, nn.Identity()), backend="aot_eager")
    x = torch.randn(8, 32, 32, requires_grad=True)
    gradients = []
    for layer in (lowered, compiled, larger):
        layer(x).square().sum().backward()
        gradients.append([x.grad, *(each.grad for each in lowered.parameters())])
        x.grad = None
        lowered.zero_grad()
    for others in gradients[1:]:
        assert all(torch.equal(one, other) for one, other in zip(gradients[0], others, strict=True))


def chained(
    found: Plan, graph: Graph, model: nn.Module, batch: Any
) -> list[tuple[float, dict[str, tuple[torch.Tensor, Placed]]]]:
    """Every rank: all layers of the model as modules, one after another, with torch's autograd between them."""

    def job(comm: ThreadRank) -> tuple[float, dict[str, tuple[torch.Tensor, Placed]]]:
        made: dict[tuple[int | None, str], torch.Tensor] = {}
        lowered = lower(found, graph)
        for name, tensor in batch_of(graph, batch).items():
            made[None, name] = cut(tensor, lowered.batch[name], comm.mesh, comm.rank).clone()
        layers: list[LayerModule] = []
        for k, layer in enumerate(graph.layers):
            layers.append(module(found, k, model, graph=graph, comm=comm))
            results = layers[-1](*(made[source.layer, source.name] for source in layer.inputs))
            results = results if isinstance(results, tuple) else (results,)
            made.update({(k, name): each for (name, _), each in zip(layers[-1].output_places, results, strict=True)})
        loss = made[graph.loss.layer, graph.loss.name]
        loss.backward()
        gradients: dict[str, tuple[torch.Tensor, Placed]] = {}
        for layer, lowered_layer in zip(layers, lowered.layers, strict=True):
            for name, each in layer.named_parameters():
                whole = name if name in lowered.rest else f"{lowered_layer.path}.{name}"
                if each.grad is not None:
                    known = gradients[whole][0] if whole in gradients else 0
                    gradients[whole] = known + each.grad, lowered.rest[whole].use
        return loss.item(), gradients

    return on_threads(found.mesh, job)


@pytest.mark.parametrize(
    ("name", "way", "seed"),
    [
        ("gpt-tiny", "least", None), ("gpt-tiny", "recomputed", None), ("gpt-tiny", "offloaded", 1), ("llama-tiny", "fast", None),
        ("llama-tiny", "least", 2), ("bert-tiny", "kept", 3), ("moe-tiny", "least", None), ("resnet-tiny", "least", 4),
    ],
)  # fmt: skip
def test_all_layers_in_a_row_are_the_model(name: str, way: str, seed: int | None) -> None:
    """Whatever was chosen, partial sums between layers too: each rank's gradients are its tiles of the model's."""
    model, batch, wanted = model_of(name)
    first = planned(name, "x=2,y=2", way)
    found = first if seed is None else drawn(first, Random(seed))
    for rank, (loss, gradients) in enumerate(chained(found, first.source.graph, model, batch)):
        assert loss == pytest.approx(wanted.loss, rel=1e-6)
        tiles = {key: cut(wanted.gradients[key], place, found.mesh, rank) for key, (_, place) in gradients.items()}
        whole = Ran(wanted.loss, tiles)
        assert gradients.keys() == wanted.gradients.keys()
        assert worst_of(Ran(loss, {key: each for key, (each, _) in gradients.items()}), whole) < (1e-5, "")


def test_ranks_of_torch_distributed_are_the_default() -> None:
    """A block under tensor parallelism on two processes. Sums over 2 ranks of up to 128 numbers are rounded in another order."""
    model, batch, _ = model_of("gpt-tiny")
    found = baseline_plan(model, batch, "2xCPU", "tp", mesh="tp=2", precision="fp32", seconds=3)
    block, x = copy.deepcopy(model.blocks[1]), torch.randn(8, 32, 32, requires_grad=True)
    y = block(x)
    y.square().sum().backward()
    rest = lower(found, found.source.graph).rest
    given = (found.to_json(), to_json(found.source.graph), "blocks.1", model, x.detach(), "cpu")
    for rank, (made, of_input, gradients) in enumerate(pool(2).run("tests.rank_jobs.lowered:layer", *given)):
        torch.testing.assert_close(made, y.detach(), rtol=1e-5, atol=1e-5)
        wanted = {"x": x.grad, **{name: each.grad for name, each in block.named_parameters()}}
        tiles = {
            name: each if name == "x" else cut(each, rest[f"blocks.1.{name}"].use, found.mesh, rank)
            for name, each in wanted.items()
        }
        assert worst_of(Ran(0.0, {"x": of_input, **gradients}), Ran(0.0, tiles)) < (1e-5, "")


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_the_checker_accepts_its_steps(seed: int | None) -> None:
    model, _, _ = model_of("llama-tiny")
    first = planned("llama-tiny", "x=2,y=2", "least")
    found = first if seed is None else drawn(first, Random(seed))
    lowered = lower(found, first.source.graph)

    class Nobody:
        mesh, rank = found.mesh, 0

    layers = [
        LayerModule(lowered, k, {**dict(model.named_parameters()), **dict(model.named_buffers())}, Nobody())._layer
        for k in range(len(lowered.layers))
    ]
    check(replace(lowered, layers=tuple(layers)))


def test_what_is_wrong_is_named(alone: tuple[nn.Module, Plan]) -> None:
    model, found = alone
    with pytest.raises(RunError, match=r"no layer 'block.1'; the nearest are blocks.1, blocks.0"):
        module(found, "block.1", model)
    with pytest.raises(RunError, match=r"2 layers have the path '': give one of the indices 0, 3"):
        module(found, "", model)
    with pytest.raises(RunError, match=r"there is no layer 9: the plan has 4"):
        module(found, 9, model)
    with pytest.raises(
        RunError, match=r"layer blocks.1: the model has no 'blocks.1.norm1.weight'; the nearest are blocks.0.norm1"
    ):
        module(found, "blocks.1", {"blocks.0.norm1.weight": torch.ones(32)})
    with pytest.raises(RunError, match=r"this plan was loaded, and has no graph: give graph="):
        module(Plan.from_json(found.to_json()), "blocks.1", model)
    lowered = module(found, "blocks.1", model)
    with pytest.raises(RunError, match=r"layer blocks.1: 2 inputs, it takes 1: add"):
        lowered(torch.ones(1), torch.ones(1))
    with pytest.raises(RunError, match=r"'add' is float32\[2, 32, 32\], but rank 0 has float32\[8, 32, 32\] of \[8, 32, 32\]"):
        lowered(torch.ones(2, 32, 32))
    with pytest.raises(RunError, match=r"'add' is float64\[8, 32, 32\], but rank 0 has float32"):
        lowered(torch.ones(8, 32, 32, dtype=torch.float64))
    loss = lowered(torch.ones(8, 32, 32)).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RunError, match=r"layer blocks.1: a second backward"):
        loss.backward()


def test_random_numbers_differ_from_call_to_call_and_are_the_seeds() -> None:
    torch.manual_seed(0)
    model = zoo.build("gpt-tiny", dropout=0.5)
    found = plan(model, zoo.example_batch("gpt-tiny", 8), "1xCPU", mesh="x=1", precision="fp32", time_limit=1)
    one, same, other = (module(found, "blocks.0", model, seed=seed) for seed in (0, 0, 7))
    x = torch.randn(8, 32, 32)
    first = one(x)
    assert torch.equal(first, same(x))
    assert not torch.equal(first, other(x))
    assert not torch.equal(first, one(x))


def test_eager_gradients_are_those_of_the_plain_model(alone: tuple[nn.Module, Plan]) -> None:
    """A model with its blocks replaced by lowered ones trains as before."""
    model, found = alone
    batch = zoo.example_batch("gpt-tiny", 8)
    changed = copy.deepcopy(model)
    for k in range(2):
        changed.blocks[k] = module(found, f"blocks.{k}", model)
    one, other = plainly(model, batch), plainly(changed, batch)
    assert other.loss == pytest.approx(one.loss, rel=1e-6)
    assert worst_of(other, one) < (1e-5, "")
