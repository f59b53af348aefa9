"""FLOPs of an operator, from shapes: a multiplication and an addition are two. Only contractions and convolutions count: all
other operators are bound by memory traffic."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

Shape = Sequence[int]

ATTENTION = (
    "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
)  # fmt: skip
# Positions of arguments that decide the number: whether a convolution is transposed; how many rows of a group are no padding.
LITERALS = {
    "aten.convolution.default": 6, "aten.convolution_backward.default": 7,
    "scrimp.ragged_linear.default": 4, "scrimp.ragged_outer.default": 3,
}  # fmt: skip


def flops(target: str, inputs: Sequence[Shape], outputs: Sequence[Shape | None], literal: int = 0) -> int:
    """`inputs`: shapes of the tensors among the arguments, in order; `outputs`: None for unused ones. `literal`: the argument in
    `LITERALS`."""
    name, transposed = target.removeprefix("aten.").removeprefix("scrimp.").partition(".")[0], bool(literal)
    match name:
        case "mm" | "bmm" | "_grouped_mm":  # every row, or every column, is in one group
            return _product(inputs[0], inputs[1])
        case "addmm" | "baddbmm" | "addbmm":
            return _product(inputs[1], inputs[2])
        case "ragged_linear":  # of the rows of each group, those that are no padding
            return _product((inputs[0][0], literal, inputs[0][-1]), inputs[2])
        case "ragged_outer":
            return _product((inputs[0][0], literal, inputs[0][-1]), inputs[1])
        case "mv" | "dot" | "vdot":
            return 2 * prod(inputs[0])
        case "addmv":
            return 2 * prod(inputs[1])
        case "convolution":
            return _convolution(inputs[1], inputs[0] if transposed else outputs[0] or ())
        case "convolution_backward":  # gradients of the input and of the weight are each a convolution of the same size
            return sum(_convolution(inputs[2], inputs[1 if transposed else 0]) for made in outputs[:2] if made is not None)
    if name in ATTENTION:
        return _attention(inputs[0], inputs[1], inputs[2])
    if name.removesuffix("_backward") in ATTENTION:  # the scores again, and two matmuls for each of the two
        query, keys, values = inputs[1], inputs[2], inputs[3]
        return 2 * _attention(query, keys, values) + _product(query, (*keys[:-2], keys[-1], keys[-2]))
    return 0


def _product(left: Shape, right: Shape) -> int:
    return 2 * prod(left) * right[-1]


def _attention(query: Shape, keys: Shape, values: Shape) -> int:
    """Scores, then their product with the values. By convention a causal mask saves nothing."""
    rows = prod(query[:-1])
    return 2 * rows * keys[-2] * (query[-1] + values[-1])


def _convolution(weight: Shape, output: Shape) -> int:
    """For each element of the output (transposed: of the input) a product over the weight's other dims; the weight's shape
    accounts for groups."""
    return 2 * prod(output) * prod(weight[1:])
