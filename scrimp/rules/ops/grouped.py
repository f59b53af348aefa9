"""Grouped matmuls, as experts use them. `offs` holds the end of each group of rows.

    rows   i k, g k j -> i j     rows of a group with its matrix: where groups are split, rows of other members' groups are zeros
    sums   i s, s j -> g i j     the gradient of these matrices: every group sums over its own s

All members hold all of `offs`: it is small, and a group's start is in the entry before its own.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from scrimp.rules.core.builder import Draft
from scrimp.rules.core.call import Call
from scrimp.rules.core.local_context import Here, family
from scrimp.rules.core.rule import SUM, Rule

_ALIGNED = 16  # bytes
TARGET = "aten._grouped_mm.default"


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


GROUPED = family({TARGET: _rule}, runs={TARGET: _run})
