"""`localize`: the local function of one rank for its shard of an operator; `plain_call`: the same, where it is one torch call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from scrimp.capture import Named, Op
from scrimp.layout import Mesh
from scrimp.rules.core.call import At, bind
from scrimp.rules.core.layouts import Split
from scrimp.rules.core.local_context import AllReduce, Draw, Here, Literals, Runs
from scrimp.rules.core.rule import Rule
from scrimp.rules.core.schema_private import schema
from scrimp.rules.ops.registry import FAMILIES
from scrimp.rules.ops.views import VIEWS

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


@dataclass(frozen=True)
class PlainCall:
    """The local function of an operator as one call of a torch function. Inputs among the arguments are `At`, by index."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


def plain_call(op: Op, rule: Rule, split: Split, mesh: Mesh, rank: int) -> PlainCall | None:
    """None if the rank does more than call the operator with local sizes: it communicates, draws, or adds nothing."""
    call, found = bind(op), schema(op.target)
    assert call is not None, op.target
    assert found is not None, op.target
    here = Here(call=call, rule=rule, split=split, mesh=mesh, rank=rank, all_reduce=_never, draw=_never)
    if op.target in VIEWS.runs:
        return PlainCall(torch.reshape, (At(index=0), here.shape(rule.outputs[0])), {})
    addend = _ADDENDS.get(op.target)
    if addend is not None and call.at(addend) is not None and not here.first(here.summed(here.of(addend))):
        return None
    own = {factor for dims in (*rule.inputs, *rule.outputs) if dims is not None for dim in dims for factor in dim}
    if found.draws or (op.target in _RUNS and any(factor in own and axes for factor, axes in split.items())):
        return None
    given = {**call.arguments, **(_LITERALS[op.target](here) if op.target in _LITERALS else {})}
    positional = tuple(_real(given[of.name]) for of in found.arguments if not of.keyword)
    keyword = {of.name: _real(given[of.name]) for of in found.arguments if of.keyword}
    defaults = {of.name: _real(of.default) for of in found.arguments if of.keyword}
    return PlainCall(found.function, positional, {name: value for name, value in keyword.items() if value != defaults[name]})


def _never(*_: Any) -> Any:
    raise AssertionError("a plain call neither communicates nor draws")


def _real(argument: Any) -> Any:
    """A literal as torch takes it."""
    if isinstance(argument, Named):
        return torch.device(argument.name) if argument.what == "device" else getattr(torch, argument.name)
    if isinstance(argument, tuple):
        return [_real(each) for each in argument]
    return argument


def nothing(like: torch.Tensor) -> torch.Tensor:
    """Zeros that take no memory."""
    return like.new_zeros(()).expand(like.shape)
