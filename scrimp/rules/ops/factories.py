"""Operators that create tensors: each member makes its shard. Random ones draw by tile; replicas draw the same numbers."""

from __future__ import annotations

from typing import Any

import torch

from scrimp.rules.core.builder import Draft
from scrimp.rules.core.call import Call
from scrimp.rules.core.local_context import Here, family
from scrimp.rules.core.rule import Rule

_SIZED = tuple(f"aten.{name}.default" for name in ("full", "zeros", "ones", "new_full", "new_zeros", "new_ones", "new_empty")) + (
    "aten.empty.memory_format",
)
_LIKE = tuple(f"aten.{name}.default" for name in ("full_like", "zeros_like", "ones_like", "empty_like"))
_COUNTING = (
    "aten.arange.default",
    "aten.arange.start",
    "aten.arange.start_step",
    "aten.scalar_tensor.default",
    "aten.linspace.default",
    "aten.eye.default",
    "aten.eye.m",
)
_DRAWN = ("aten.rand.default", "aten.randn.default")
_DRAWN_LIKE = ("aten.rand_like.default", "aten.randn_like.default", "aten.bernoulli.p", "aten.bernoulli.default")
EMPTY = frozenset({"aten.empty.memory_format", "aten.empty_like.default", "aten.new_empty.default"})
RANDOM = frozenset({*_DRAWN, *_DRAWN_LIKE, "aten.native_dropout.default"})


def _made(call: Call) -> Rule | None:
    """A tensor argument that only gives the dtype may have any layout."""
    if call.made[0] is None:
        return None
    draft = Draft(call)
    if call.at("self") is not None:
        draft.put("self", draft.dims(call.shape("self")))
    ranged = call.op.target in _COUNTING
    return draft.rule(tuple(draft.dim(size, ranged=ranged) for size in call.made[0]))


def _like(call: Call) -> Rule:
    draft = Draft(call)
    dims = draft.dims(call.shape("self"))
    draft.put("self", dims)
    return draft.rule(dims)


def _local_size(here: Here) -> dict[str, Any]:
    return {"size": here.shape(here.rule.outputs[0])}


def _run_counting(here: Here, given: dict[str, Any]) -> tuple[Any, ...]:
    """Makes the whole tensor and slices the local part: these are small."""
    (whole,) = here.call.run(given)
    dims = here.rule.outputs[0]
    assert dims is not None
    for at, dim in enumerate(dims):
        whole = whole.narrow(at, here.start(dim), here.size(dim))
    return (whole.clone(),)


def _run_drawn(here: Here, given: dict[str, Any]) -> tuple[Any, ...]:
    dims, name = here.rule.outputs[0], here.call.op.target.split(".")[1]
    assert dims is not None
    like: Any = given.get("self")
    generator = here.generator(dims)
    device, dtype = given.get("device"), given.get("dtype")
    if like is not None:
        device, dtype = device or like.device, dtype or like.dtype
    shape = here.shape(dims)
    if name == "bernoulli":
        chance = given.get("p", like)
        return ((torch.rand(shape, generator=generator, device=device) < chance).to(dtype),)
    make = torch.randn if name.startswith("randn") else torch.rand
    return (make(shape, generator=generator, device=device, dtype=dtype),)


FACTORIES = family(
    {**dict.fromkeys((*_SIZED, *_COUNTING, *_DRAWN), _made), **dict.fromkeys((*_LIKE, *_DRAWN_LIKE), _like)},
    literals=dict.fromkeys((*_SIZED, *_DRAWN), _local_size),
    runs={**dict.fromkeys(_COUNTING, _run_counting), **dict.fromkeys((*_DRAWN, *_DRAWN_LIKE), _run_drawn)},
)
