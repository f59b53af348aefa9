"""Capturing: layers that run as code give the loss and the gradients of the model, bit for bit; what they keep is what
PyTorch keeps; depth costs no graphs."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from scrimp import zoo
from scrimp.capture import Graph, LayerGraph, capture, from_json, to_json
from scrimp.errors import CaptureError
from tests.support.graph_runner import run

TINY = {name: zoo.config(name) for name in zoo.names() if "tiny" in name}
DEEP = [name for name, config in TINY.items() if hasattr(config, "layers")]

# layers, distinct graphs, operators of each graph
GOLDEN = {
    "gpt-tiny": (4, 3, (8, 63, 14)),
    "llama-tiny": (4, 3, (4, 169, 33)),
    "bert-tiny": (4, 3, (14, 88, 29)),
    "vit-tiny": (4, 3, (13, 63, 15)),
    "resnet-tiny": (1, 1, (60,)),
    "vgg-tiny": (1, 1, (53,)),
    "vgg-tiny-bn": (1, 1, (65,)),
    "moe-tiny": (4, 3, (8, 143, 23)),
}


FIFTY = pytest.param("resnet50", 18, 10, marks=pytest.mark.full)


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in (*model.named_parameters(), *model.named_buffers())}


def counts(graph: Graph) -> tuple[int, int, tuple[int, ...]]:
    return len(graph.layers), len(graph.graphs), tuple(len(each.ops) for each in graph.graphs)


def assert_runs_like(model: nn.Module, batch: dict[str, Tensor], graph: Graph) -> None:
    start = state_of(model)
    got = run(graph, start, {name: tensor.clone() for name, tensor in batch.items()})
    result = model(**batch)
    loss = result if isinstance(result, Tensor) else result.loss
    loss.backward()
    assert torch.equal(got.loss, loss.detach())
    wanted = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert {*got.gradients} == {*wanted}
    for name, gradient in wanted.items():
        assert torch.isfinite(gradient).all()
        torch.testing.assert_close(
            got.gradients[name], gradient, rtol=1e-6, atol=1e-7, msg=lambda text, name=name: f"{name}: {text}"
        )
    for name, buffer in model.named_buffers():
        assert torch.equal(got.buffers.get(name, start[name]), buffer), name


def zoo_case(name: str, **overrides: Any) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    inputs, targets = zoo.example_batch(name, **overrides)
    words = ("images", "labels") if inputs.is_floating_point() else ("tokens", "targets")
    return zoo.build(name, **overrides), dict(zip(words, (inputs, targets), strict=True))


@cache
def captured(name: str) -> Graph:
    model, batch = zoo_case(name)
    return capture(model, tuple(batch.values()))


@pytest.mark.parametrize("name", TINY)
def test_layers_that_run_give_the_model_s_loss_and_gradients(name: str) -> None:
    model, batch = zoo_case(name)
    graph = captured(name)
    assert [value.name for value in graph.batch] == [*batch]
    assert counts(graph) == GOLDEN[name]
    assert_runs_like(model, batch, graph)


@pytest.mark.parametrize("name", DEEP)
def test_depth_makes_no_graphs(name: str) -> None:
    model, batch = zoo_case(name, layers=12)
    graph = capture(model, tuple(batch.values()))
    assert counts(graph)[:2] == (14, 3)
    assert counts(graph)[2][:2] == GOLDEN[name][2][:2]
    if name != "moe-tiny":  # whose last layer reads a number from every other
        assert counts(graph)[2][2] == GOLDEN[name][2][2]
    assert [layer.path for layer in graph.layers[1:-1]] == [f"blocks.{k}" for k in range(12)]
    assert_runs_like(model, batch, graph)


@pytest.mark.parametrize(("name", "layers", "graphs"), [("resnet18", 7, 6), FIFTY, ("vgg16", 12, 11)])
def test_layers_of_convolutional_nets(name: str, layers: int, graphs: int) -> None:
    with torch.device("meta"):
        model = zoo.build(name)
    graph = capture(model, zoo.example_batch(name))
    assert counts(graph)[:2] == (layers, graphs)
    if name == "resnet50":
        assert [layer.path for layer in graph.layers[1:4]] == ["stages.0.0", "stages.0.1", "stages.0.2"]
        assert len({layer.graph for layer in graph.layers if layer.path.startswith("stages.2.")}) == 2


def test_on_meta_as_on_the_cpu_and_the_model_is_left_as_it_was() -> None:
    model, batch = zoo_case("gpt-tiny")
    before = [(id(tensor), tensor.data_ptr()) for tensor in (*model.parameters(), *model.buffers())]
    want = capture(model, tuple(batch.values()))
    assert [(id(tensor), tensor.data_ptr()) for tensor in (*model.parameters(), *model.buffers())] == before
    with torch.device("meta"):
        empty = zoo.build("gpt-tiny")
    got = capture(empty, tuple(tensor.to("meta") for tensor in batch.values()))
    assert got == want
    assert all(parameter.is_meta for parameter in empty.parameters())
    assert capture(model, (batch["tokens"],), {"targets": batch["targets"]}) == want


def test_one_tensor_given_twice_is_two() -> None:
    model, batch = zoo_case("gpt-tiny")
    graph = capture(model, (batch["tokens"], batch["tokens"]))
    assert [value.name for value in graph.batch] == ["tokens", "targets"]
    sources = [source.name for layer in graph.layers for source in layer.inputs if source.layer is None]
    assert sources == ["tokens", "targets"]


def test_tied_weights_are_one_parameter_of_two_layers() -> None:
    model, _ = zoo_case("gpt-tiny")
    graph = captured("gpt-tiny")
    users = [k for k, layer in enumerate(graph.layers) if "embed.weight" in dict(layer.parameters).values()]
    assert users == [0, 3]
    assert [parameter.name for parameter in graph.parameters] == [name for name, _ in model.named_parameters()]


def test_values_that_all_layers_read_come_from_the_layer_that_makes_them() -> None:
    model, batch = zoo_case("llama-tiny", layers=3)
    graph = capture(model, tuple(batch.values()))
    for layer in graph.layers[1:-1]:
        assert [source.layer for source in layer.inputs][1:] == [0, 0]  # cosines and sines


@pytest.mark.parametrize("name", TINY)
def test_json_round_trip(name: str) -> None:
    graph = captured(name)
    text = to_json(graph)
    assert from_json(text) == graph
    assert to_json(from_json(text)) == text


def test_json_of_another_version_is_refused() -> None:
    data = json.loads(to_json(captured("gpt-tiny")))
    with pytest.raises(CaptureError, match=r"this is scrimp.graph version 9, but this scrimp reads scrimp.graph version 2"):
        from_json(json.dumps({**data, "version": 9}))


def test_a_graph_is_read_without_torch() -> None:
    code = "from scrimp.capture import from_json, to_json; import sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def saved(graph: LayerGraph, parameters: set[str]) -> int:
    """Bytes of storages that the forward makes, or is given, and the backward reads."""
    values = {value.name: value for value in graph.values}
    forward = {name for op in graph.ops if not op.backward for name in op.outputs if name} | {*graph.inputs}
    read = {name for op in graph.ops if op.backward for name in op.inputs if name in forward}
    bases = {values[name].storage for name in read} - parameters
    return sum(math.prod(values[base].shape) * getattr(torch, values[base].dtype).itemsize for base in bases)


@pytest.mark.parametrize("name", ["gpt-tiny", "llama-tiny", "bert-tiny", "vit-tiny"])
def test_what_a_block_saves_is_what_pytorch_saves(name: str) -> None:
    model, batch = zoo_case(name)
    graph = captured(name)
    block = model.get_submodule("blocks.0")
    storages: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    hooks: list[Any] = []
    block.register_forward_pre_hook(
        lambda *_: hooks.append(torch.autograd.graph.saved_tensors_hooks(note, lambda x: x)) or hooks[0].__enter__()
    )
    block.register_forward_hook(lambda *_: hooks[0].__exit__())
    kept = model(**batch)
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    eager = sum(nbytes for pointer, nbytes in storages.items() if pointer not in own)
    layer = graph.layers[1]
    values = {value.name: value for value in graph.graphs[layer.graph].values}
    borders = [values[given] for given in graph.graphs[layer.graph].inputs if values[given].kind == "border"]
    # Llama's cosines and sines are slices of buffers in eager mode, but come over the border here.
    tables = sum(4 * math.prod(value.shape) for value in borders[1:])
    assert saved(graph.graphs[layer.graph], {local for local, _ in layer.parameters}) == eager + tables > 0
    del kept


def test_flops_are_those_that_pytorch_counts() -> None:
    """PyTorch knows nothing of custom operators: those of the experts have a test of their own."""
    own = ("scaled_dot_product", "ragged")
    for name in ("gpt-tiny", "resnet-tiny", "vgg-tiny", "moe-tiny"):
        model, batch = zoo_case(name)
        graph = captured(name)
        ours = sum(
            op.flops
            for layer in graph.layers
            for op in graph.graphs[layer.graph].ops
            if not any(word in op.target for word in own)
        )
        with FlopCounterMode(display=False) as counter:
            model(**batch).backward()
        theirs = counter.get_flop_counts()["Global"]
        assert ours == sum(count for op, count in theirs.items() if not any(word in str(op) for word in own)), name


def test_flops_of_experts() -> None:
    """Both matrices, forward and for two gradients, times the rows that the chosen experts get; padding has no work."""
    model, batch = zoo_case("moe-tiny")
    config: Any = model.config
    graph, rows = captured("moe-tiny"), batch["tokens"].numel() * config.chosen
    ours = [op.flops for layer in graph.layers for op in graph.graphs[layer.graph].ops if "ragged" in op.target]
    assert len(ours) == 2 * 3 * config.layers
    assert {*ours} == {2 * rows * config.dim * config.expansion * config.dim}


def test_flops_of_attention() -> None:
    block = captured("gpt-tiny").graphs[1]
    batch_heads, seq, dim = 2 * 4, 32, 8
    attention = [op.flops for op in block.ops if "scaled_dot_product" in op.target]
    assert attention == [2 * 2 * batch_heads * seq * seq * dim, 5 * 2 * batch_heads * seq * seq * dim]


class Turned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(4, 6, 3, stride=2)

    def forward(self, images: Tensor) -> Tensor:
        return F.relu(self.up(images)).mean()


def test_flops_of_a_transposed_convolution() -> None:
    images = torch.randn(2, 4, 5, 5)
    model = Turned()
    graph = capture(model, (images,))
    with FlopCounterMode(display=False) as counter:
        model(images).backward()
    assert sum(op.flops for op in graph.graphs[0].ops) == counter.get_total_flops()


@pytest.mark.parametrize("name", ["gpt-tiny", "llama-tiny"])
def test_cells_tie_the_backward_to_the_forward(name: str) -> None:
    block = captured(name).graphs[1]
    forward = {op.cell: op for op in block.ops if not op.backward}
    assert len(forward) == sum(not op.backward for op in block.ops)  # one operator of the forward to a cell
    for op in block.ops:
        if not op.backward:
            continue
        target = op.target.removeprefix("aten.").partition(".")[0]
        if target == "mm":  # reads a gradient of the output, and the other operand or its transpose
            assert forward[op.cell].target in ("aten.mm.default", "aten.addmm.default")
            assert op.flops == forward[op.cell].flops
        elif target.endswith("_backward") and target != "slice_backward":
            assert forward[op.cell].target.removeprefix("aten.").partition(".")[0] == target.removesuffix("_backward")
    assert {op.cell for op in block.ops} == set(range(1 + max(op.cell for op in block.ops)))


def test_the_sum_of_two_gradients_is_of_the_cell_whose_output_they_are_of() -> None:
    block = captured("gpt-tiny").graphs[1]
    sums = [op for op in block.ops if op.backward and op.target == "aten.add.Tensor"]
    middle = next(op for op in block.ops if op.target == "aten.add.Tensor")  # the residual stream between attention and MLP
    assert [op.cell == middle.cell for op in sums] == [True, False]
    assert [op.cell for op in block.ops].count(sums[1].cell) == 1  # of the block's input: nobody here makes that
    assert dict(block.gradients)[block.inputs[0]] in sums[1].outputs


def test_operators_say_where_they_come_from() -> None:
    block = captured("gpt-tiny").graphs[1]
    assert {op.where.partition(":")[0] for op in block.ops if "gelu" in op.target} == {"blocks.0.mlp, zoo/gpt.py"}
