"""Linear layers of experts on rows of static shape, as operators `scrimp::ragged_linear` and `scrimp::ragged_outer`.

    x       groups, blocks, rows, dim        in each group and block the rows of its first expert, of its second, ..., padding
    ends    groups, blocks, experts          where the rows of each expert of a block end
    weight  blocks, experts, dim, hidden

Shapes do not depend on the data, but the arithmetic does: padding is not read, and its results are zeros. So a block needs room
for all rows that its experts could get, and time for those that they got. The host reads the ends, and waits for them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

Segment = tuple[tuple[int, int, slice], tuple[int, int]]  # rows of x; the expert in its block


def _segments(ends: Tensor) -> Iterator[Segment]:
    for group, blocks in enumerate(ends.tolist()):
        for block, experts in enumerate(blocks):
            start = 0
            for expert, end in enumerate(experts):
                if end > start:
                    yield (group, block, slice(start, end)), (block, expert)
                start = end


@torch.library.custom_op("scrimp::ragged_linear", mutates_args=())
def ragged_linear(x: Tensor, ends: Tensor, weight: Tensor, bias: Tensor | None, filled: int) -> Tensor:
    """Rows of an expert times its matrix, plus its bias. `filled`: how many rows of a group are no padding, in all blocks
    together; counts of arithmetic read it."""
    made = x.new_zeros(*x.shape[:-1], weight.shape[-1])
    for rows, expert in _segments(ends):
        if bias is None:
            torch.mm(x[rows], weight[expert], out=made[rows])
        else:
            torch.addmm(bias[expert], x[rows], weight[expert], out=made[rows])
    return made


@torch.library.custom_op("scrimp::ragged_outer", mutates_args=())
def ragged_outer(x: Tensor, y: Tensor, ends: Tensor, filled: int) -> tuple[Tensor, Tensor]:
    """Gradients of weight and bias, from the gradient `y` of the result: sums over the rows of each expert, in all groups. In 16
    bits the groups are added in float32, one expert at a time."""
    shape, exact = ends.shape[1:], torch.promote_types(x.dtype, torch.float32)
    weight, bias = x.new_zeros(*shape, x.shape[-1], y.shape[-1]), x.new_zeros(*shape, y.shape[-1])
    by_expert: dict[tuple[int, int], list[tuple[int, int, slice]]] = {}
    for rows, expert in _segments(ends):
        by_expert.setdefault(expert, []).append(rows)
    for expert, places in by_expert.items():
        products, sums = weight[expert].to(exact), bias[expert].to(exact)  # themselves, unless they have 16 bits
        for rows in places:
            if exact == x.dtype:
                products.addmm_(x[rows].t(), y[rows])
            else:
                products += x[rows].t() @ y[rows]
            sums += y[rows].sum(0, dtype=exact)
        if exact != x.dtype:
            weight[expert], bias[expert] = products, sums
    return weight, bias


@ragged_linear.register_fake
def _(x: Tensor, ends: Tensor, weight: Tensor, bias: Tensor | None, filled: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[-1])


@ragged_outer.register_fake
def _(x: Tensor, y: Tensor, ends: Tensor, filled: int) -> tuple[Tensor, Tensor]:
    return x.new_empty(*ends.shape[1:], x.shape[-1], y.shape[-1]), x.new_empty(*ends.shape[1:], y.shape[-1])


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, ends, weight, bias, ctx.filled = inputs
    ctx.biased = bias is not None
    ctx.save_for_backward(x, ends, weight)


def _backward(ctx: Any, y: Tensor) -> tuple[Tensor | None, ...]:
    x, ends, weight = ctx.saved_tensors
    of_x = ragged_linear(y, ends, weight.transpose(-1, -2), None, ctx.filled)
    of_weight, of_bias = ragged_outer(x, y, ends, ctx.filled)
    return of_x, None, of_weight, of_bias if ctx.biased else None, None


ragged_linear.register_autograd(_backward, setup_context=_save)
