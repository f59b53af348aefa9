"""Every operator of the zoo has the class that its FLOPs say, and the classes that its name says."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from scrimp import zoo
from scrimp.capture import Op, capture
from scrimp.cluster import CLASSES
from scrimp.cluster._operators import BY_FLOPS
from scrimp.planner.cost.operator_classes import class_of


def op(target: str, *args: object, **kwargs: object) -> Op:
    return Op(
        name="one", target=f"aten.{target}.default", args=args, kwargs=tuple(kwargs.items()), outputs=(), backward=False, cell=0,
        flops=0, where="",
    )  # fmt: skip


@pytest.mark.parametrize("name", ["gpt-tiny", "llama-tiny", "bert-tiny", "vit-tiny", "resnet-tiny", "moe-tiny"])
def test_contractions_are_the_operators_with_flops(name: str) -> None:
    with torch.device("meta"):
        model = zoo.build(name)
    for graph in capture(model, zoo.example_batch(name, 4)).graphs:
        values = {value.name: value for value in graph.values}
        for each in graph.ops:
            found = class_of(each, values)
            assert found in CLASSES
            assert (found in BY_FLOPS) == (each.flops > 0), each.target


@pytest.mark.parametrize(
    ("operator", "wanted"),
    [
        (op("mm"), "matmul"),
        (op("_scaled_dot_product_flash_attention_for_cpu", 0, 0, 0, 0.0, True), "causal attention"),
        (op("_scaled_dot_product_flash_attention_for_cpu", 0, 0, 0, 0.0, False), "attention"),
        (op("_scaled_dot_product_flash_attention_for_cpu_backward", *[0] * 6, 0.0, True), "causal attention, backward"),
        (op("_scaled_dot_product_efficient_attention", 0, 0, 0, None, True), "attention"),
        (op("_scaled_dot_product_efficient_attention", 0, 0, 0, None, True, 0.0, True), "causal attention"),
        (op("_scaled_dot_product_flash_attention", 0, 0, 0, is_causal=True), "causal attention"),
        (op("native_layer_norm"), "normalization"),
        (op("native_layer_norm_backward"), "normalization, backward"),
        (op("_log_softmax_backward_data"), "softmax"),
        (op("nll_loss_forward"), "softmax"),
        (op("embedding_dense_backward"), "lookup, backward"),
        (op("embedding"), "lookup"),
        (op("index_put"), "lookup"),
        (op("sum"), "reduction"),
        (op("sum", 0, [0, 1]), "reduction of rows"),
        (op("sum", 0, [-1]), "reduction"),
        (op("mean", 0, dim=[0]), "reduction of rows"),
        (op("cat"), "concatenation"),
        (op("clone"), "transposing copy"),
        (op("_to_copy"), "cast"),
        (op("cumsum"), "pointwise"),
        (op("gelu_backward"), "pointwise"),
    ],
)
def test_by_name(operator: Op, wanted: str) -> None:
    assert class_of(operator, {}) == wanted


@pytest.mark.parametrize(
    ("shapes", "wanted"), [(((4, 8), (4, 8)), "pointwise"), (((4, 8), (8,)), "broadcast"), (((4, 8), ()), "pointwise")]
)
def test_an_operator_that_repeats_an_input_is_a_broadcast(shapes: tuple[tuple[int, ...], ...], wanted: str) -> None:
    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(shapes[1]))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * self.weight).sum()

    (graph,) = capture(Product(), (torch.zeros(shapes[0]),)).graphs
    values = {value.name: value for value in graph.values}
    first = next(each for each in graph.ops if each.target == "aten.mul.Tensor")
    assert class_of(first, values) == wanted
