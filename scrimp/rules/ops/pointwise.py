"""Element-wise operators with broadcasting. Torch's own tags identify them."""

from __future__ import annotations

from typing import Any

import torch

from scrimp.rules.core.builder import REALS, Draft, broadcast, stretched
from scrimp.rules.core.call import Call
from scrimp.rules.core.local_context import Here, family
from scrimp.rules.core.rule import Rule
from scrimp.rules.core.schema_private import schema

# Not marked by torch, or composite in some version of it.
UNMARKED = (
    "aten._to_copy.default",
    "aten.alias.default",
    "aten.contiguous.default",
    "aten.copy.default",
    "aten.detach.default",
    "aten.elu_backward.default",
    "aten.fill.Scalar",
    "aten.fill.Tensor",
    "aten.floor_divide.default",
    "aten.hardsigmoid_backward.default",
    "aten.hardswish.default",
    "aten.hardswish_backward.default",
    "aten.hardtanh_backward.default",
    "aten.leaky_relu.default",
    "aten.leaky_relu_backward.default",
    "aten.lift_fresh_copy.default",
    "aten.masked_fill.Tensor",
    "aten.mish_backward.default",
    "aten.softplus_backward.default",
    "aten.threshold_backward.default",
    "aten.where.Scalar",
    "aten.where.ScalarOther",
    "aten.where.ScalarSelf",
)
# By name, the arguments in which together the operator is linear: f(a + b) = f(a) + f(b), all others being fixed.
_ALONE = ("self",)
_LINEAR: dict[str, tuple[tuple[str, ...], ...]] = {
    "add.Tensor": (("self", "other"),),
    "sub.Tensor": (("self", "other"),),
    "mul.Tensor": (("self",), ("other",)),
    "div.Tensor": (_ALONE,),
    "mul.Scalar": (_ALONE,),
    "div.Scalar": (_ALONE,),
    "neg.default": (_ALONE,),
    "clone.default": (_ALONE,),
    "alias.default": (_ALONE,),
    "detach.default": (_ALONE,),
    "contiguous.default": (_ALONE,),
    "where.self": (("self", "other"),),
    "addcmul.default": (("self", "tensor1"), ("self", "tensor2")),
    "addcdiv.default": (("self", "tensor1"),),
}


def is_pointwise(target: str) -> bool:
    """By torch's own tag; without those that draw random numbers or write into their operands."""
    found = schema(target)
    return found is not None and (found.pointwise or target in UNMARKED) and not found.writes and not found.draws


def pointwise(call: Call) -> Rule:
    draft = Draft(call)
    out = draft.dims(broadcast(call.shapes))
    for index, shape in enumerate(call.shapes):
        draft.inputs[index] = stretched(shape, out)
    return draft.rule(*[out] * len(call.op.outputs), linear=_linear(call))


def _linear(call: Call) -> tuple[tuple[str, ...], ...]:
    name = call.op.target.partition(".")[2]
    if name.endswith("_backward.default"):
        return (("grad_output",),)
    if name == "_to_copy.default":
        return (_ALONE,) if _to_float(call) else ()
    if name in ("add.Tensor", "sub.Tensor") and call.at("other") is None:
        return ()  # every member would add the number
    if name == "copy.default":  # a rounded sum differs from the sum of rounded parts
        return (("src",),) if call.dtypes[call.at("self") or 0] in REALS else ()
    if name == "masked_fill.Scalar":
        return (_ALONE,) if call.arguments["value"] == 0 else ()
    return _LINEAR.get(name, ())


def _to_float(call: Call) -> bool:
    wanted = call.arguments["dtype"]
    return wanted is None or wanted.name in REALS


def _dropout(call: Call) -> Rule:
    draft = Draft(call)
    dims = draft.dims(call.shape("input"))
    draft.put("input", dims)
    return draft.rule(dims, dims)


def _run_dropout(here: Here, given: dict[str, Any]) -> tuple[Any, ...]:
    """The operator draws from the process's global state; here each tile has its own generator, and replicas share one."""
    x, p = given["input"], given["p"]
    if given["train"] is False or p == 0:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    draws = torch.rand(x.shape, generator=here.generator(here.of("input")), dtype=torch.float32, device=x.device)
    kept = draws >= p
    return x * kept * (0.0 if p == 1 else 1 / (1 - p)), kept


POINTWISE = family(
    {**dict.fromkeys(UNMARKED, pointwise), "aten.native_dropout.default": _dropout},
    runs={"aten.native_dropout.default": _run_dropout},
)
