"""Operators that split a dim into pieces or concatenate pieces. Where all cuts fall on multiples of a size g, the dim is a
product: of blocks of g, and of positions inside a block. The blocks stay unsplit, the inside may be split: a fused
query-key-value of 3 x 64 is cut into its three with each of them sharded."""

from __future__ import annotations

from functools import partial
from math import gcd
from typing import Any

from scrimp.rules.core.builder import Draft
from scrimp.rules.core.call import Call
from scrimp.rules.core.local_context import Here, family
from scrimp.rules.core.rule import FREE, WHOLE, Dims, Rule


def _blocks(draft: Draft, total: int, *pieces: int, cuts: tuple[int, ...] = ()) -> list[tuple[int, ...]]:
    """Factors of a dim of `total`, and of each piece of it."""
    inside = gcd(total, *pieces, *cuts)
    shared = draft.dim(inside)
    return [(*draft.dim(size // inside if inside else size, WHOLE), *shared) for size in (total, *pieces)]


def _at(dims: Dims, at: int, dim: tuple[int, ...]) -> Dims:
    return (*dims[:at], dim, *dims[at + 1 :])


def _range(call: Call, size: int) -> tuple[int, int, int]:
    """Start, end and length of a slice, with Python's semantics."""
    start, end, step = slice(call.arguments["start"], call.arguments["end"], call.arguments["step"]).indices(size)
    return start, max(start, end), len(range(start, end, step))


def _slice(call: Call) -> Rule:
    """Also its backward, which writes the gradient to the slice's position."""
    backward = call.op.target == "aten.slice_backward.default"
    whole = tuple(call.arguments["input_sizes"]) if backward else call.shape("self")
    at = call.arguments["dim"] % len(whole)
    start, _, length = _range(call, whole[at])
    draft = Draft(call)
    dims = draft.dims((*whole[:at], 1, *whole[at + 1 :]))
    if length == whole[at]:
        piece = full = draft.dim(length)
    elif call.arguments["step"] == 1:
        full, piece = _blocks(draft, whole[at], length, cuts=(start,))
    else:
        full, piece = draft.dim(whole[at], WHOLE), draft.dim(length, WHOLE)
    draft.put("grad_output" if backward else "self", _at(dims, at, piece if backward else full))
    return draft.rule(_at(dims, at, full if backward else piece), linear=[("grad_output",) if backward else ("self",)])


def _local_slice(here: Here) -> dict[str, Any]:
    """Start and end fall on blocks, of each of which the member holds a part."""
    backward = here.call.op.target == "aten.slice_backward.default"
    dims = here.rule.outputs[0] if backward else here.of("self")
    assert dims is not None
    at = here.call.arguments["dim"] % len(dims)
    parts, size = here.count(dims[at]), here.size(dims[at])
    start, end, _ = _range(here.call, size * parts)
    local = {"start": start // parts, "end": end // parts}
    return {**local, "input_sizes": here.shape(dims)} if backward else local


def _select(call: Call) -> Rule:
    shape, draft = call.shape("self"), Draft(call)
    at = call.arguments["dim"] % len(shape)
    dims = tuple(draft.dim(size, WHOLE if index == at else FREE) for index, size in enumerate(shape))
    draft.put("self", dims)
    return draft.rule(*[dims[:at] + dims[at + 1 :]] * len(call.op.outputs), linear=[("self",)])


def _select_backward(call: Call) -> Rule:
    shape, draft = call.arguments["input_sizes"], Draft(call)
    at = call.arguments["dim"] % len(shape)
    dims = tuple(draft.dim(size, WHOLE if index == at else FREE) for index, size in enumerate(shape))
    draft.put("grad_output", dims[:at] + dims[at + 1 :])
    return draft.rule(dims, linear=[("grad_output",)])


def _scatter_pieces(call: Call) -> Rule:
    """`slice_scatter` and `select_scatter`: replace a piece of a tensor."""
    shape, draft = call.shape("self"), Draft(call)
    at = call.arguments["dim"] % len(shape)
    dims = tuple(draft.dim(size, WHOLE if index == at else FREE) for index, size in enumerate(shape))
    draft.put("self", dims)
    if call.op.target.startswith("aten.select"):
        draft.put("src", dims[:at] + dims[at + 1 :])
    else:
        draft.put("src", _at(dims, at, draft.dim(call.shape("src")[at], WHOLE)))
    return draft.rule(dims, linear=[("self", "src")])


def _sizes(call: Call) -> tuple[int, ...]:
    """The sizes of the pieces of a split."""
    total = call.shape("self")[call.arguments["dim"] % len(call.shape("self"))]
    if "split_sizes" in call.arguments:
        return tuple(call.arguments["split_sizes"])
    size = call.arguments["split_size"]
    return tuple(min(size, total - start) for start in range(0, total, size)) if size and total else (total,)


def _split(call: Call) -> Rule:
    shape, draft = call.shape("self"), Draft(call)
    at = call.arguments["dim"] % len(shape)
    dims = draft.dims((*shape[:at], 1, *shape[at + 1 :]))
    full, *pieces = _blocks(draft, shape[at], *_sizes(call))
    draft.put("self", _at(dims, at, full))
    return draft.rule(*[_at(dims, at, piece) for piece in pieces], linear=[("self",)])


def _local_split(here: Here) -> dict[str, Any]:
    dims = here.of("self")
    parts = here.count(dims[here.call.arguments["dim"] % len(dims)])
    if "split_sizes" in here.call.arguments:
        return {"split_sizes": [size // parts for size in here.call.arguments["split_sizes"]]}
    return {"split_size": here.call.arguments["split_size"] // parts}


def _cat(call: Call) -> Rule | None:
    """Also `stack`, whose new dim stays unsplit."""
    places = [index for index in call.all_at("tensors") if index is not None]
    shapes = [call.shapes[index] for index in places]
    if len({len(shape) for shape in shapes}) > 1:
        return None  # torch skips empty tensors of one dim
    draft, rank = Draft(call), len(shapes[0])
    if call.op.target == "aten.stack.default":
        at, dims = call.arguments["dim"] % (rank + 1), draft.dims(shapes[0])
        draft.inputs.update(dict.fromkeys(places, dims))
        out = (*dims[:at], draft.dim(len(places), WHOLE), *dims[at:])
    else:
        at = call.arguments["dim"] % rank
        dims = draft.dims((*shapes[0][:at], 1, *shapes[0][at + 1 :]))
        full, *pieces = _blocks(draft, sum(shape[at] for shape in shapes), *(shape[at] for shape in shapes))
        draft.inputs.update({index: _at(dims, at, piece) for index, piece in zip(places, pieces, strict=True)})
        out = _at(dims, at, full)
    return draft.made([out], linear=[frozenset(places)])


def _pad(call: Call) -> Rule:
    shape, pad, draft = call.shape("self"), call.arguments["pad"], Draft(call)
    dims, out = list(draft.dims(shape[: len(shape) - len(pad) // 2])), list[tuple[int, ...]]()
    out += dims
    for at in range(len(shape) - len(pad) // 2, len(shape)):
        before, after = _pads(call, len(shape), at)
        if before == after == 0:
            dim = piece = draft.dim(shape[at])
        else:
            piece, dim = _blocks(draft, shape[at] + before + after, shape[at], cuts=(abs(before), abs(after)))
        dims.append(dim)
        out.append(piece)
    draft.put("self", tuple(dims))
    return draft.rule(tuple(out), linear=[("self",)] if not call.arguments["value"] else [])


def _pads(call: Call, rank: int, at: int) -> tuple[int, int]:
    """Padding before and after a dim; torch counts dims from the last."""
    place = 2 * (rank - 1 - at)
    before, after = call.arguments["pad"][place : place + 2]
    return before, after


def _local_pad(here: Here) -> dict[str, Any]:
    dims, pad = here.of("self"), here.call.arguments["pad"]
    return {"pad": [pad[place] // here.count(dims[len(dims) - 1 - place // 2]) for place in range(len(pad))]}


def _local_shape(name: str, here: Here) -> dict[str, Any]:
    return {name: here.shape(here.rule.outputs[0])}


PIECES = family(
    {
        **dict.fromkeys(("aten.slice.Tensor", "aten.slice_backward.default"), _slice),
        **dict.fromkeys(("aten.select.int", "aten.unbind.int"), _select),
        "aten.select_backward.default": _select_backward,
        **dict.fromkeys(("aten.slice_scatter.default", "aten.select_scatter.default"), _scatter_pieces),
        **dict.fromkeys(("aten.split.Tensor", "aten.split_with_sizes.default", "aten.unsafe_split.Tensor"), _split),
        **dict.fromkeys(("aten.cat.default", "aten.stack.default"), _cat),
        "aten.constant_pad_nd.default": _pad,
    },
    literals={
        **dict.fromkeys(("aten.slice.Tensor", "aten.slice_backward.default"), _local_slice),
        "aten.select_backward.default": partial(_local_shape, "input_sizes"),
        **dict.fromkeys(("aten.split.Tensor", "aten.split_with_sizes.default", "aten.unsafe_split.Tensor"), _local_split),
        "aten.constant_pad_nd.default": _local_pad,
    },
)
