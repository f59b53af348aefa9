"""Reshapes, permutations and repeats. A dim that is split up or merged is a product of factors: 128 x 192 viewed as 4 x 32 x 3 x
64 is (4 32) (3 64), and each of the four may be split."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import gcd
from typing import Any

from scrimp.rules.core.builder import Draft
from scrimp.rules.core.call import Call
from scrimp.rules.core.local_context import Here, family
from scrimp.rules.core.rule import WHOLE, Dims, Rule

_SELF = [("self",)]


def regroup(draft: Draft, source: Sequence[int], target: Sequence[int]) -> tuple[Dims, Dims]:
    """The dims of two shapes with equally many elements, in the factors that they share. Where their cuts do not nest, as in 6 x
    4 -> 8 x 3, the common major part (2) is shared, and the rest of either stays unsplit."""
    dims: tuple[list[list[int]], list[list[int]]] = ([[] for _ in source], [[] for _ in target])
    if 0 in source:
        return draft.dims(source, WHOLE), draft.dims(target, WHOLE)
    left = (
        [[size, at] for at, size in enumerate(source) if size > 1],
        [[size, at] for at, size in enumerate(target) if size > 1],
    )
    while left[0]:
        (a, i), (b, j) = left[0][0], left[1][0]
        common = gcd(a, b)
        if common > 1:
            (factor,) = draft.dim(common)
            dims[0][i].append(factor)
            dims[1][j].append(factor)
            for side in (0, 1):
                left[side][0][0] //= common
                if left[side][0][0] == 1:
                    left[side].pop(0)
        if common == 1 or (common < a and common < b):
            _keep_whole(draft, dims, left)
    return tuple(map(tuple, dims[0])), tuple(map(tuple, dims[1]))


def _keep_whole(
    draft: Draft, dims: tuple[list[list[int]], list[list[int]]], left: tuple[list[list[int]], list[list[int]]]
) -> None:
    """Takes dims from both sides until they have equally many elements; none of these is shared."""
    taken = [1, 1]
    while True:
        side = 0 if taken[0] <= taken[1] else 1
        size, at = left[side].pop(0)
        dims[side][at] += draft.dim(size, WHOLE)
        taken[side] *= size
        if taken[0] == taken[1]:
            return


def _view(call: Call) -> Rule | None:
    if call.made[0] is None:
        return None
    draft = Draft(call)
    dims, out = regroup(draft, call.shape("self"), call.made[0])
    draft.put("self", dims)
    return draft.rule(out, linear=_SELF)


def _turned(call: Call) -> Rule:
    name, shape, draft = call.op.target.split(".")[1], call.shape("self"), Draft(call)
    dims = draft.dims(shape)
    draft.put("self", dims)
    order = list(range(len(shape)))
    if name == "permute":
        order = [dim % len(shape) for dim in call.arguments["dims"]]
    elif len(shape) > 1:
        first, second = (0, 1) if name == "t" else (call.arguments["dim0"] % len(shape), call.arguments["dim1"] % len(shape))
        order[first], order[second] = order[second], order[first]
    return draft.rule(tuple(dims[at] for at in order), linear=_SELF)


def _unsqueeze(call: Call) -> Rule:
    shape, draft = call.shape("self"), Draft(call)
    dims, at = draft.dims(shape), call.arguments["dim"] % (len(shape) + 1)
    draft.put("self", dims)
    return draft.rule((*dims[:at], (), *dims[at:]), linear=_SELF)


def _squeeze(call: Call) -> Rule:
    shape, draft = call.shape("self"), Draft(call)
    named = call.arguments.get("dim", tuple(range(len(shape))))
    gone = {dim % max(len(shape), 1) for dim in (named if isinstance(named, (tuple, list)) else (named,))}
    dims = draft.dims(shape)
    draft.put("self", dims)
    kept = [dim for at, (size, dim) in enumerate(zip(shape, dims, strict=True)) if size != 1 or at not in gone]
    return draft.rule(tuple(kept), linear=_SELF)


def _expand(call: Call) -> Rule:
    """An expanded dim repeats one value: members make their part of it."""
    shape, size, draft = call.shape("self"), call.arguments["size"], Draft(call)
    dims, new = draft.dims(shape), len(size) - len(shape)
    draft.put("self", dims)
    out = [
        dims[at - new] if at >= new and (shape[at - new] != 1 or wanted in (-1, 1)) else draft.dim(wanted)
        for at, wanted in enumerate(size)
    ]
    return draft.rule(tuple(out), linear=_SELF)


def _repeat(call: Call) -> Rule:
    shape, repeats, draft = call.shape("self"), call.arguments["repeats"], Draft(call)
    dims, new = draft.dims(shape), len(repeats) - len(shape)
    draft.put("self", dims)
    out = [(*draft.dim(times), *(dims[at - new] if at >= new else ())) for at, times in enumerate(repeats)]
    return draft.rule(tuple(out), linear=_SELF)


def _mirrored(call: Call) -> Rule:
    """Positions along these dims change: flip, roll, and the triangles."""
    shape, draft, name = call.shape("self"), Draft(call), call.op.target.split(".")[1]
    last = tuple(range(len(shape)))[-2:]
    touched = {dim % len(shape) for dim in (last if name in ("tril", "triu") else call.arguments["dims"] or range(len(shape)))}
    dims = tuple(draft.dim(size, WHOLE) if at in touched else draft.dim(size) for at, size in enumerate(shape))
    draft.put("self", dims)
    return draft.rule(dims, linear=_SELF)


def _to_local_shape(name: str, here: Here) -> dict[str, Any]:
    return {name: here.shape(here.rule.outputs[0])}


def _local_repeats(here: Here) -> dict[str, Any]:
    out, own = here.shape(here.rule.outputs[0]), here.shape(here.of("self"))
    return {"repeats": [size // of for size, of in zip(out, (*[1] * (len(out) - len(own)), *own), strict=True)]}


def _run_view(here: Here, given: dict[str, Any]) -> tuple[Any, ...]:
    """A tile need not have the strides of the whole tensor, so a copy may be needed where the whole needs none."""
    return (given["self"].reshape(here.shape(here.rule.outputs[0])),)


_VIEWS = ("aten.view.default", "aten._unsafe_view.default", "aten.reshape.default")
_TURNS = ("aten.t.default", "aten.transpose.int", "aten.permute.default")
_SQUEEZES = ("aten.squeeze.default", "aten.squeeze.dim", "aten.squeeze.dims")
_MIRRORS = ("aten.flip.default", "aten.roll.default", "aten.tril.default", "aten.triu.default")

VIEWS = family(
    {
        **dict.fromkeys(_VIEWS, _view),
        **dict.fromkeys(_TURNS, _turned),
        **dict.fromkeys(_SQUEEZES, _squeeze),
        **dict.fromkeys(_MIRRORS, _mirrored),
        "aten.unsqueeze.default": _unsqueeze,
        "aten.expand.default": _expand,
        "aten.repeat.default": _repeat,
    },
    literals={"aten.expand.default": partial(_to_local_shape, "size"), "aten.repeat.default": _local_repeats},
    # A dim of 2 that is split in two has size 1 locally, and must not be squeezed.
    runs=dict.fromkeys((*_VIEWS, *_SQUEEZES), _run_view),
)
