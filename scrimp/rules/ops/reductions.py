"""Reductions over dims. A sum over a split dim leaves a partial sum; a maximum or an "any" is all-reduced; operators that need
all of a dim at once (sorts, products, scans) do not split it. A mean is the local sum divided by the global count."""

from __future__ import annotations

from functools import partial
from math import prod
from typing import Any

import torch

from scrimp.rules.core.builder import Draft
from scrimp.rules.core.call import Call
from scrimp.rules.core.call import call as call_target
from scrimp.rules.core.local_context import Here, family
from scrimp.rules.core.rule import FREE, INSIDE, SUM, WHOLE, Dims, Rule, Talk


def reduced(call: Call, rank: int) -> set[int]:
    """The dims in an operator's `dim` argument; all where it is absent."""
    dim = call.arguments.get("dim")
    if dim is None or dim == ():
        return set(range(rank))
    return {each % max(rank, 1) for each in (dim if isinstance(dim, (tuple, list)) else (dim,))} if rank else set()


def _without(dims: Dims, over: set[int], keep: bool) -> Dims:
    return tuple(() if index in over else dim for index, dim in enumerate(dims) if keep or index not in over)


def _reduction(kind: str, call: Call, linear: bool = False) -> Rule:
    draft, over = Draft(call), reduced(call, len(call.shape("self")))
    dims = tuple(draft.dim(size, kind if index in over else FREE) for index, size in enumerate(call.shape("self")))
    draft.put("self", dims)
    out = _without(dims, over, bool(call.arguments.get("keepdim", False)))
    of = tuple(factor for dim in out for factor in dim)
    talks = [Talk(factor=f, of=of, itemsize=call.itemsize("self")) for i in over for f in dims[i]] if kind == INSIDE else []
    return draft.rule(*[out] * len(call.op.outputs), linear=[("self",)] if linear else [], talks=talks)


def _histogram(call: Call) -> Rule:
    """Counts of shards add up, unless the bins depend on the data."""
    draft, made = Draft(call), call.made[0]
    by_data = call.arguments["min"] == call.arguments["max"]
    draft.put("self", draft.dims(call.shape("self"), WHOLE if by_data else SUM))
    return draft.rule(draft.dims(made or (call.arguments["bins"],), WHOLE))


def _along(call: Call, *, linear: bool) -> Rule | None:
    """Scans and sorts: the results keep all dims, and the dim they run along is not split."""
    rank, made = len(call.shape("self")), call.made[0] or (call.made[-1] if call.made else None)
    along = call.arguments["dim"] % max(rank, 1)
    if made is None:
        return None
    draft = Draft(call)
    dims = tuple(draft.dim(size, WHOLE if index == along else FREE) for index, size in enumerate(call.shape("self")))
    draft.put("self", dims)
    out = tuple(draft.dim(made[along], WHOLE) if index == along else dim for index, dim in enumerate(dims))
    return draft.rule(*[out] * len(call.op.outputs), linear=[("self",)] if linear else [])


def _run_mean(here: Here, given: dict[str, Any]) -> tuple[Any, ...]:
    dims, x = here.of("self"), given["self"]
    over = reduced(here.call, len(dims))
    if here.count(factor for index in over for factor in dims[index]) == 1:
        return here.call.run(given)
    count = prod(here.rule.factors[factor].size for index in over for factor in dims[index])
    (total,) = call_target(
        "aten.sum.dim_IntList",
        {"self": x, "dim": sorted(over), "keepdim": given.get("keepdim", False), "dtype": given["dtype"]},
    )
    return (total / count,)


def _run_extreme(how: str, here: Here, given: dict[str, Any]) -> tuple[Any, ...]:
    """A minimum and an "all" are the maximum of the negated values."""
    (local,) = here.call.run(given)
    dims = here.of("self")
    split = [factor for index in sorted(reduced(here.call, len(dims))) for factor in dims[index]]
    if here.count(split) == 1:
        return (local,)
    flips = how in ("amin", "all")
    numbers = local.to(torch.uint8) if local.dtype == torch.bool else local
    if flips:
        numbers = 1 - numbers if local.dtype == torch.bool else -numbers
    numbers = here.reduce(numbers, "max", split)
    if flips:
        numbers = 1 - numbers if local.dtype == torch.bool else -numbers
    return (numbers.to(local.dtype),)


_SUMS = ("aten.sum.default", "aten.sum.dim_IntList")
_MEANS = ("aten.mean.default", "aten.mean.dim")
_EXTREMES = {
    f"aten.{how}.{overload}": how
    for how, overloads in {
        "amax": ("default",),
        "amin": ("default",),
        "any": ("default", "dim", "dims"),
        "all": ("default", "dim", "dims"),
    }.items()
    for overload in overloads
}
_WHOLE = (
    "aten.max.default",
    "aten.max.dim",
    "aten.min.default",
    "aten.min.dim",
    "aten.argmax.default",
    "aten.argmin.default",
    "aten.prod.default",
    "aten.prod.dim_int",
    "aten.logsumexp.default",
    "aten.linalg_vector_norm.default",
    "aten.var.correction",
    "aten.var.dim",
    "aten.var_mean.correction",
    "aten.var_mean.dim",
    "aten.std.correction",
)
_ALONG = {
    "aten.cumsum.default": True,
    "aten.cumprod.default": False,
    "aten.topk.default": False,
    "aten.sort.default": False,
    "aten.sort.stable": False,
    "aten.argsort.default": False,
}

REDUCTIONS = family(
    {
        **dict.fromkeys((*_SUMS, *_MEANS), partial(_reduction, SUM, linear=True)),
        **dict.fromkeys(_EXTREMES, partial(_reduction, INSIDE)),
        **dict.fromkeys(_WHOLE, partial(_reduction, WHOLE)),
        "aten.histc.default": _histogram,
        **{target: partial(_along, linear=linear) for target, linear in _ALONG.items()},
    },
    runs={
        **dict.fromkeys(_MEANS, _run_mean),
        **{target: partial(_run_extreme, how) for target, how in _EXTREMES.items()},
    },
)
