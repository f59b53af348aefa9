"""Losses: negative log-likelihood, and element-wise losses. A mean over split rows is the global sum over the global count
(ignored labels do not count); a member that holds a range of the classes handles the labels in its range, and ignores the
others."""

from __future__ import annotations

from math import prod
from typing import Any

import torch

from scrimp.rules.core.builder import Draft
from scrimp.rules.core.call import Call
from scrimp.rules.core.local_context import Here, family
from scrimp.rules.core.rule import FREE, INSIDE, SUM, Rule, Talk

_NONE, _MEAN, _SUM = 0, 1, 2  # torch's numbers of reductions
_IGNORED = -100  # not a class, wherever the range begins


def _forward(call: Call) -> Rule:
    """Loss and count are all-reduced: two numbers."""
    draft, shape, each = Draft(call), call.shape("self"), call.arguments["reduction"] == _NONE
    at = 0 if len(shape) == 1 else 1
    dims = tuple(
        draft.dim(size, INSIDE if index == at or not each else FREE, ranged=index == at) for index, size in enumerate(shape)
    )
    rows = dims[:at] + dims[at + 1 :]
    draft.put("self", dims)
    draft.put("target", rows)
    draft.put("weight", (dims[at],))
    of = tuple(factor for dim in rows for factor in dim) if each else ()
    talks = [Talk(factor=f, of=of, itemsize=call.itemsize("self"), times=2) for f in dims[at]]
    if not each:
        talks += [Talk(factor=f, of=(), itemsize=call.itemsize("self"), times=2) for dim in rows for f in dim]
    return draft.rule(rows if each else (), (), talks=talks)


def _backward(call: Call) -> Rule:
    draft, shape = Draft(call), call.shape("self")
    at = 0 if len(shape) == 1 else 1
    dims = tuple(draft.dim(size, ranged=index == at) for index, size in enumerate(shape))
    rows = dims[:at] + dims[at + 1 :]
    draft.put("self", dims)
    draft.put("target", rows)
    draft.put("weight", (dims[at],))
    draft.put("grad_output", rows if call.arguments["reduction"] == _NONE else ())
    draft.put("total_weight", ())
    return draft.rule(dims, linear=[("grad_output",)])


def _own(here: Here, given: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Labels relative to the local range of classes, and which of them are in it; the others are 0."""
    dims, target = here.of("self"), given["target"]
    classes = dims[0 if len(dims) == 1 else 1]
    start = here.start(classes)
    hit = (target >= start) & (target < start + here.size(classes)) & (target != given["ignore_index"])
    return torch.where(hit, target - start, 0), hit


def _run_forward(here: Here, given: dict[str, Any]) -> tuple[Any, ...]:
    dims, x = here.of("self"), given["self"]
    at = 0 if len(dims) == 1 else 1
    rows = [factor for index, dim in enumerate(dims) if index != at for factor in dim]
    if here.count(dims[at]) == 1 and (here.count(rows) == 1 or given["reduction"] == _NONE):
        return here.call.run(given)
    labels, hit = _own(here, given)
    weights = torch.ones((), dtype=x.dtype, device=x.device) if given["weight"] is None else given["weight"][labels]
    losses = torch.where(hit, -x.gather(at, labels.unsqueeze(at)).squeeze(at) * weights, 0)
    if given["reduction"] == _NONE:
        return here.reduce(losses, "sum", dims[at]), x.new_zeros(())
    # Each row counts on the member that holds its class, so that one sum over all members is right with weights and without.
    count = here.reduce(torch.where(hit, weights, 0).sum(), "sum", [*rows, *dims[at]])
    total = here.reduce(losses.sum(), "sum", [*rows, *dims[at]])
    return total / count if given["reduction"] == _MEAN else total, count.to(x.dtype)


def _run_backward(here: Here, given: dict[str, Any]) -> tuple[Any, ...]:
    labels, hit = _own(here, given)
    return here.call.run({**given, "target": labels.masked_fill(~hit, _IGNORED), "ignore_index": _IGNORED})


def _elementwise(call: Call) -> Rule:
    """Of two tensors of one shape. A mean is a partial sum as well: each member divides by the global count."""
    backward, each = call.at("grad_output") is not None, call.arguments["reduction"] == _NONE
    draft = Draft(call)
    dims = draft.dims(call.shape("self"), FREE if backward or each else SUM)
    draft.put("self", dims)
    draft.put("target", dims)
    if backward:
        draft.stretched("grad_output", dims)
    return draft.rule(dims if backward or each else (), linear=[("grad_output",)])


def _run_elementwise(here: Here, given: dict[str, Any]) -> tuple[Any, ...]:
    factors = [factor for dim in here.of("self") for factor in dim]
    if given["reduction"] != _MEAN or here.count(factors) == 1:
        return here.call.run(given)
    (made,) = here.call.run({**given, "reduction": _SUM})
    return (made / prod(here.rule.factors[factor].size for factor in factors),)


_OF_PAIRS = tuple(
    f"aten.{name}{backward}.default" for name in ("mse_loss", "smooth_l1_loss", "huber_loss") for backward in ("", "_backward")
)

LOSSES = family(
    {
        **dict.fromkeys(_OF_PAIRS, _elementwise),
        **dict.fromkeys(("aten.nll_loss_forward.default", "aten.nll_loss2d_forward.default"), _forward),
        **dict.fromkeys(("aten.nll_loss_backward.default", "aten.nll_loss2d_backward.default"), _backward),
    },
    runs={
        **dict.fromkeys(_OF_PAIRS, _run_elementwise),
        **dict.fromkeys(("aten.nll_loss_forward.default", "aten.nll_loss2d_forward.default"), _run_forward),
        **dict.fromkeys(("aten.nll_loss_backward.default", "aten.nll_loss2d_backward.default"), _run_backward),
    },
)
