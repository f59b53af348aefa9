"""Matmuls and convolutions: a dim of both operands that is not in the result is summed."""

from __future__ import annotations

from typing import Any

from scrimp.rules.core.builder import Draft
from scrimp.rules.core.call import Call
from scrimp.rules.core.local_context import Here, family
from scrimp.rules.core.rule import FREE, SUM, WHOLE, Dims, Rule

_PRODUCT = {"mm": ("self", "mat2"), "addmm": ("mat1", "mat2"), "bmm": ("self", "mat2"), "baddbmm": ("batch1", "batch2")}


def _product(call: Call) -> Rule:
    left, right = _PRODUCT[call.op.target.split(".")[1]]
    draft = Draft(call)
    *batch, rows, inner = call.shape(left)
    b, i, k, j = draft.dims(batch), draft.dim(rows), draft.dim(inner, SUM), draft.dim(call.shape(right)[-1])
    draft.put(left, (*b, i, k))
    draft.put(right, (*b, k, j))
    out = (*b, i, j)
    added = [] if left == "self" else ["self"]
    for name in added:
        draft.stretched(name, out)
    return draft.rule(out, linear=[(*added, left), (*added, right)])


def _linear(call: Call) -> Rule:
    draft = Draft(call)
    *rows, inner = call.shape("input")
    i, k, j = draft.dims(rows), draft.dim(inner, SUM), draft.dim(call.shape("weight")[0])
    draft.put("input", (*i, k))
    draft.put("weight", (j, k))
    draft.put("bias", (j,))
    return draft.rule((*i, j), linear=[("input", "bias"), ("weight", "bias")])


def _channels(call: Call, draft: Draft, *, into: str, out_of: str) -> tuple[Dims, Dims, Dims, Dims]:
    """Input, weight, output and bias of a convolution. Groups are a factor of both channels; spatial positions stay unsplit."""
    groups, weight = call.arguments["groups"], call.shape("weight")
    n, g = draft.dim(call.shape("input")[0], into), draft.dim(groups)
    per_input, per_output = call.shape("input")[1] // groups, weight[1] if call.arguments["transposed"] else weight[0] // groups
    ci, co = draft.dim(per_input, out_of), draft.dim(per_output, FREE if out_of == SUM else SUM)
    space, kernel = draft.dims(call.shape("input")[2:], WHOLE), draft.dims(weight[2:], WHOLE)
    weights = ((*g, *ci), co) if call.arguments["transposed"] else ((*g, *co), ci)
    return (n, (*g, *ci), *space), (*weights, *kernel), (n, (*g, *co)), ((*g, *co),)


def _convolution(call: Call) -> Rule | None:
    made = call.made[0]
    if made is None or len(call.shape("input")) != len(call.shape("weight")):
        return None
    draft = Draft(call)
    x, w, y, bias = _channels(call, draft, into=FREE, out_of=SUM)
    draft.put("input", x)
    draft.put("weight", w)
    draft.put("bias", bias)
    return draft.rule((*y, *draft.dims(made[2:], WHOLE)), linear=[("input", "bias"), ("weight", "bias")])


def _convolution_backward(call: Call) -> Rule | None:
    """The gradient of the input sums over the output's channels, those of weight and bias over the batch. The bias's gradient
    does not have the input's channels: where these are split it is replicated."""
    if len(call.shape("input")) != len(call.shape("weight")):
        return None
    draft = Draft(call)
    x, w, y, bias = _channels(call, draft, into=SUM, out_of=FREE)
    draft.put("input", x)
    draft.put("weight", w)
    draft.put("grad_output", (*y, *draft.dims(call.shape("grad_output")[2:], WHOLE)))
    wanted = call.arguments["output_mask"]
    outputs = [dims if mask else None for dims, mask in zip((x, w, bias), wanted, strict=True)]
    return draft.rule(*outputs, linear=[("grad_output",)])


def _local_groups(here: Here) -> dict[str, Any]:
    """A group is split as a whole: of the factors of both channels only the groups are in input and output."""
    x, w = here.of("input"), here.of("weight")
    shared = [factor for factor in x[1] if factor in w[0]] if not here.call.arguments["transposed"] else _outer(here)
    local: dict[str, Any] = {"groups": here.call.arguments["groups"] // here.count(shared)}
    if here.call.arguments.get("bias_sizes") is not None:
        local["bias_sizes"] = [here.size(here.of("grad_output")[1])]
    return local


def _outer(here: Here) -> list[int]:
    """Of a transposed convolution the weight has the output's channels without the groups."""
    dims = here.rule.outputs[0] if here.call.at("grad_output") is None else here.of("grad_output")
    channels = dims[1] if dims is not None else ()
    return [factor for factor in channels if factor not in here.of("weight")[1]]


_MATRIX = ("aten.mm.default", "aten.addmm.default", "aten.bmm.default", "aten.baddbmm.default")

CONTRACTION = family(
    {
        **dict.fromkeys(_MATRIX, _product),
        "aten.linear.default": _linear,
        "aten.convolution.default": _convolution,
        "aten.convolution_backward.default": _convolution_backward,
    },
    literals=dict.fromkeys(("aten.convolution.default", "aten.convolution_backward.default"), _local_groups),
    addends={
        "aten.addmm.default": "self",
        "aten.baddbmm.default": "self",
        "aten.linear.default": "bias",
        "aten.convolution.default": "bias",
    },
)
