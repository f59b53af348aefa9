"""`localize`: the local function of one rank for its shard of an operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from scrimp.capture import Op
from scrimp.layout import Mesh
from scrimp.rules.core.call import bind
from scrimp.rules.core.layouts import Split
from scrimp.rules.core.local_context import AllReduce, Draw, Here, Literals, Runs
from scrimp.rules.core.rule import Rule
from scrimp.rules.ops.registry import FAMILIES

_LITERALS: dict[str, Literals] = {target: each for family in FAMILIES for target, each in family.literals.items()}
_ADDENDS: dict[str, str] = {target: name for family in FAMILIES for target, name in family.addends.items()}
_RUNS: dict[str, Runs] = {target: each for family in FAMILIES for target, each in family.runs.items()}


def localize(
    op: Op, rule: Rule, split: Split, mesh: Mesh, rank: int, *, all_reduce: AllReduce, draw: Draw
) -> Callable[..., tuple[Any, ...]]:
    """A function from the local tensors, in the order of `op.inputs`, to the local outputs, in the order of `op.outputs`. It
    depends on the rank by its mesh coordinates alone. Operators with internal communication call `all_reduce(tensor, "sum" or
    "max", axes)`, on all members in the same order; `draw(coordinates)` gives the generator of operators that draw random
    numbers, by the coordinates that distinguish tiles."""
    call = bind(op)
    assert call is not None, op.target
    here = Here(call=call, rule=rule, split=split, mesh=mesh, rank=rank, all_reduce=all_reduce, draw=draw)
    literals = _LITERALS[op.target](here) if op.target in _LITERALS else {}
    runs = _RUNS.get(op.target)
    addend = _ADDENDS.get(op.target)
    silent = addend is not None and call.at(addend) is not None and not here.first(here.summed(here.of(addend)))

    def member(*tensors: Any) -> tuple[Any, ...]:
        given = {**call.filled(tensors), **literals}
        if silent and addend is not None:
            given[addend] = nothing(given[addend])
        return runs(here, given) if runs is not None else call.run(given)

    return member


def nothing(like: torch.Tensor) -> torch.Tensor:
    """Zeros that take no memory."""
    return like.new_zeros(()).expand(like.shape)
