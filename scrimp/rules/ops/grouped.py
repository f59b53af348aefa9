"""Grouped matmuls, as experts use them. `offs` holds the end of each group of rows.

    rows   i k, g k j -> i j     rows of a group with its matrix: where groups are split, rows of other members' groups are zeros
    sums   i s, s j -> g i j     the gradient of these matrices: every group sums over its own s

All members hold all of `offs`: it is small, and a group's start is in the entry before its own.

The zoo's experts have rows of static shape (`scrimp/zoo/ragged.py`): r rows in each group g of tokens and each block b of
experts. `ends` says where the rows of each expert e end.

    linear  g b r d, g b e, b e d h, b e h -> g b r h
    outer   g b r d, g b r h, g b e -> b e d h, b e h       the gradients of matrices and biases: sums over g and r

A split of g is data parallelism, one of b expert parallelism, and ones of d and h are tensor parallelism.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from scrimp.rules.core.builder import Draft
from scrimp.rules.core.call import Call
from scrimp.rules.core.local_context import Here, family
from scrimp.rules.core.rule import FREE, SUM, WHOLE, Rule

_ALIGNED = 16  # bytes
TARGET = "aten._grouped_mm.default"
LINEAR, OUTER = "scrimp.ragged_linear.default", "scrimp.ragged_outer.default"


def _rule(call: Call) -> Rule | None:
    left, right = call.shape("self"), call.shape("mat2")
    if call.at("bias") is not None:
        return None
    draft = Draft(call)
    if len(left) == len(right) == 3:
        g, i, k, j = draft.dim(left[0]), draft.dim(left[1]), draft.dim(left[2], SUM), draft.dim(right[2])
        draft.put("self", (g, i, k))
        draft.put("mat2", (g, k, j))
        return draft.rule((g, i, j), linear=[("self",), ("mat2",)])
    if call.at("offs") is None or len(left) != 2:
        return None
    if len(right) == 3:
        i, k = draft.dim(left[0], ranged=True), draft.dim(left[1], SUM)
        g, j = draft.dim(right[0], SUM, ranged=True), draft.dim(right[2])
        draft.put("self", (i, k))
        draft.put("mat2", (g, k, j))
        return draft.rule((i, j), linear=[("self",), ("mat2",)])
    i, s, j = draft.dim(left[0]), draft.dim(left[1], SUM, ranged=True), draft.dim(right[1])
    g = draft.dim(call.shape("offs")[0], ranged=True)
    draft.put("self", (i, s))
    draft.put("mat2", (s, j))
    return draft.rule((g, i, j), linear=[("self",), ("mat2",)])


def _run(here: Here, given: dict[str, Any]) -> tuple[Any, ...]:
    """Clips the groups' ends to the local range; rows before the first local group do not count."""
    if given["offs"] is None:
        return (_product(here.call, given),)
    rows = given["mat2"].dim() == 3
    dims = here.rule.outputs[0]
    assert dims is not None
    along, groups = (dims[0], here.of("mat2")[0]) if rows else (here.of("self")[1], dims[0])
    size, first, count = here.size(along), here.start(groups), here.size(groups)
    ends = (given["offs"] - here.start(along)).clamp(0, size)
    begin = ends[first - 1] if first else ends.new_zeros(())
    ends = ends[first : first + count].contiguous()
    at = torch.arange(size, device=ends.device)
    others = (at < begin) | (at >= ends[-1])
    left = given["self"].masked_fill(others[:, None] if rows else others[None, :], 0)
    made = _product(here.call, {**given, "self": left, "offs": ends})
    return (made.masked_fill(others[:, None], 0) if rows else made,)


def _product(call: Call, given: dict[str, Any]) -> torch.Tensor:
    """The kernels need rows of multiples of 16 bytes, so shards are padded."""
    left, right = given["self"], given["mat2"]
    unit = _ALIGNED // left.element_size()
    inner, columns = -left.shape[-1] % unit, -right.shape[-1] % unit
    left, wide = F.pad(left, (0, inner)), F.pad(right, (0, columns, 0, inner))
    (made,) = call.run({**given, "self": left, "mat2": wide})
    return made.narrow(-1, 0, right.shape[-1]) if columns else made  # type: ignore[no-any-return]


def _ragged(call: Call) -> Rule:
    """`ragged_linear` if it has a weight, else `ragged_outer`."""
    draft, forward = Draft(call), call.at("weight") is not None
    groups, blocks, rows, dim = call.shape("x")
    kind = FREE if forward else SUM
    g, b, r = draft.dim(groups, kind), draft.dim(blocks), draft.dim(rows, kind, ranged=True)
    e = draft.dim(call.shape("ends")[-1], WHOLE)
    d, h = draft.dim(dim, SUM if forward else FREE), draft.dim(call.shape("weight" if forward else "y")[-1])
    draft.put("x", (g, b, r, d))
    draft.put("y", (g, b, r, h))
    draft.put("ends", (g, b, e))
    draft.put("weight", (b, e, d, h))
    draft.put("bias", (b, e, h))
    if forward:
        return draft.rule((g, b, r, h), linear=[("x", "bias"), ("weight", "bias")])
    return draft.rule((b, e, d, h), (b, e, h), linear=[("y",)])


def _run_ragged(here: Here, given: dict[str, Any]) -> tuple[Any, ...]:
    """Clips the ends to the local range of rows."""
    rows = here.of("x")[2]
    if here.count(rows) > 1:
        given = {**given, "ends": (given["ends"] - here.start(rows)).clamp(0, here.size(rows))}
    return here.call.run(given)


GROUPED = family(
    {TARGET: _rule, LINEAR: _ragged, OUTER: _ragged},
    addends={LINEAR: "bias"},
    runs={TARGET: _run, LINEAR: _run_ragged, OUTER: _run_ragged},
)
