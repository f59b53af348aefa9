"""Softmax, log-softmax, and their backwards. Where the normalised dim is split, members all-reduce the maximum and the sum of the
exponentials (backward: one sum): numbers per row, never the row."""

from __future__ import annotations

from typing import Any

import torch

from scrimp.rules.core.builder import Draft
from scrimp.rules.core.call import Call
from scrimp.rules.core.local_context import Here, family
from scrimp.rules.core.rule import FREE, INSIDE, Rule, Scratch, Talk

_FORWARD = ("aten._softmax.default", "aten._safe_softmax.default", "aten._log_softmax.default")
_BACKWARD = ("aten._softmax_backward_data.default", "aten._log_softmax_backward_data.default")


def _rule(call: Call) -> Rule:
    names = ("self",) if call.op.target in _FORWARD else ("grad_output", "output")
    shape, draft = call.shape(names[0]), Draft(call)
    along = call.arguments["dim"] % max(len(shape), 1)
    dims = tuple(draft.dim(size, INSIDE if index == along else FREE) for index, size in enumerate(shape))
    for name in names:
        draft.put(name, dims)
    rows = tuple(factor for index, dim in enumerate(dims) if index != along for factor in dim)
    times, itemsize = 3 - len(names), call.itemsize(names[0])
    talks = [Talk(factor=factor, of=rows, itemsize=itemsize, times=times) for factor in (dims[along] if dims else ())]
    # Forward: the exponentials that are summed. In low precision the result is one more in float32.
    low = call.dtypes[0] in ("bfloat16", "float16")
    every = tuple(factor for dim in dims for factor in dim)
    # The operators below read and write 34 bytes an element (backward 40) in low precision, else 8 (10) elements, instead of
    # 4 (6) bytes, or 2 (3) elements.
    traffic = (15 if len(names) == 1 else 17) if low else (6 if len(names) == 1 else 7)
    scratch = Scratch(
        when=dims[along] if dims else (), of=every, itemsize=itemsize, times=(len(names) == 1) + low, traffic=traffic
    )
    return draft.rule(dims, linear=[("grad_output",)] if len(names) == 2 else [], talks=talks, scratch=[scratch])


def _along(here: Here, name: str) -> tuple[int, tuple[int, ...]]:
    """The normalised dim, and its factors."""
    dims = here.of(name)
    along = here.call.arguments["dim"] % max(len(dims), 1)
    return along, dims[along] if dims else ()


def _run_forward(here: Here, given: dict[str, Any]) -> tuple[Any, ...]:
    dim, factors = _along(here, "self")
    if here.count(factors) == 1:
        return here.call.run(given)
    x: torch.Tensor = given["self"]
    wanted = given.get("dtype") or (torch.float32 if given.get("half_to_float") else x.dtype)
    high = torch.float64 if x.dtype == torch.float64 else torch.float32
    largest = here.reduce(x.amax(dim, keepdim=True).to(high), "max", factors)
    if here.call.op.target == "aten._safe_softmax.default":
        largest = largest.masked_fill(largest == -torch.inf, 0)
    shifted = x - largest
    if here.call.op.target == "aten._log_softmax.default":
        total = here.reduce(shifted.exp().sum(dim, keepdim=True), "sum", factors)
        return (shifted.sub_(total.log_()).to(wanted),)
    total = here.reduce(shifted.exp_().sum(dim, keepdim=True), "sum", factors)
    if here.call.op.target == "aten._safe_softmax.default":
        total = total.masked_fill(total == 0, 1)
    return (shifted.div_(total).to(wanted),)


def _run_backward(here: Here, given: dict[str, Any]) -> tuple[Any, ...]:
    dim, factors = _along(here, "output")
    if here.count(factors) == 1:
        return here.call.run(given)
    high = torch.float64 if given["output"].dtype == torch.float64 else torch.float32
    gradient, output = given["grad_output"], given["output"]
    if here.call.op.target == "aten._softmax_backward_data.default":
        weighted = gradient.to(high, copy=True).mul_(output)
        total = here.reduce(weighted.sum(dim, keepdim=True), "sum", factors)
        return (weighted.addcmul_(output.to(high), total, value=-1).to(given["input_dtype"]),)
    total = here.reduce(gradient.sum(dim, keepdim=True, dtype=high), "sum", factors)
    weighted = output.to(high, copy=True).exp_().mul_(total)
    return (torch.sub(gradient, weighted, out=weighted).to(given["input_dtype"]),)


SOFTMAX = family(
    dict.fromkeys((*_FORWARD, *_BACKWARD), _rule),
    runs={**dict.fromkeys(_FORWARD, _run_forward), **dict.fromkeys(_BACKWARD, _run_backward)},
)
