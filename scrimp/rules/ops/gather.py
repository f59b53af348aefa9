"""Lookups of rows, and additions to rows. A member with a range of the rows looks up those in its range and has zeros for the
others, so that the results are partial sums; a written row goes to the member that holds it. Where indices are split and rows are
added, every member's rows are partial sums."""

from __future__ import annotations

import torch

from scrimp.rules.core.builder import REALS, Draft, broadcast, stretched
from scrimp.rules.core.call import Call
from scrimp.rules.core.local_context import Here
from scrimp.rules.core.rule import FREE, SUM, WHOLE, Dims, Rule, Scratch


def embedding_rule(call: Call) -> Rule:
    draft, (rows, columns) = Draft(call), call.shape("weight")
    v, c, i = draft.dim(rows, SUM, ranged=True), draft.dim(columns), draft.dims(call.shape("indices"))
    draft.put("weight", (v, c))
    draft.put("indices", i)
    found = tuple(factor for dim in (*i, c) for factor in dim)
    zeros = Scratch(when=v, of=found, itemsize=call.itemsize("weight"), times=0, traffic=2)  # rows of other members
    return draft.rule((*i, c), linear=[("weight",)], scratch=[zeros])


def embedding_backward_rule(call: Call) -> Rule:
    draft = Draft(call)
    counted = call.arguments["scale_grad_by_freq"]  # by a row's frequency in the global batch
    i = draft.dims(call.shape("indices"), WHOLE if counted else SUM)
    v, c = draft.dim(call.arguments["num_weights"], ranged=True), draft.dim(call.shape("grad_output")[-1])
    draft.put("grad_output", (*i, c))
    draft.put("indices", i)
    return draft.rule((v, c), linear=[("grad_output",)])


def indexed(call: Call) -> tuple[list[int], list[int], tuple[int, ...], int] | None:
    """Of `index` and its variants: the indexed dims, the inputs that hold the indices, their broadcast shape, and its position in
    the result. None where an index is a mask, whose result shape depends on the data."""
    if "dim" in call.arguments:
        at = call.at("index")
        assert at is not None
        shape = call.shapes[at] or (1,)
        return (
            [call.arguments["dim"] % max(1, len(call.shape("self")))],
            [at],
            shape,
            call.arguments["dim"] % len(call.shape("self")),
        )
    places = [(dim, at) for dim, at in enumerate(call.all_at("indices")) if at is not None]
    if not places or any(call.dtypes[at] in ("bool", "uint8") for _, at in places):
        return None
    dims = [dim for dim, _ in places]
    together = dims == list(range(dims[0], dims[0] + len(dims)))
    shape = broadcast([call.shapes[at] for _, at in places])
    return dims, [at for _, at in places], shape, dims[0] if together else 0


def index_rule(call: Call) -> Rule | None:
    found = indexed(call)
    if found is None:
        return None
    dims, inputs, shape, at = found
    draft, whole = Draft(call), call.shape("self")
    one = len(dims) == 1 and call.dtypes[call.at("self") or 0] in REALS
    i = draft.dims(shape)
    full = tuple(
        draft.dim(size, SUM if one else WHOLE, ranged=one) if dim in dims else draft.dim(size) for dim, size in enumerate(whole)
    )
    draft.put("self", full)
    for each in inputs:
        draft.inputs[each] = stretched(call.shapes[each], i)
    rest = [dim for index, dim in enumerate(full) if index not in dims]
    return draft.rule((*rest[:at], *i, *rest[at:]), linear=[("self",)])


def index_put_rule(call: Call) -> Rule | None:
    """`index_put` and `index_add`: without accumulation the last write wins, so that indices must not be split."""
    found = indexed(call)
    if found is None:
        return None
    dims, inputs, shape, at = found
    draft, whole = Draft(call), call.shape("self")
    adds = call.arguments.get("accumulate", True)
    i = draft.dims(shape, SUM if adds else WHOLE)
    full = tuple(
        draft.dim(size, FREE if len(dims) == 1 else WHOLE, ranged=True) if dim in dims else draft.dim(size)
        for dim, size in enumerate(whole)
    )
    draft.put("self", full)
    for each in inputs:
        draft.inputs[each] = stretched(call.shapes[each], i)
    rest = [dim for index, dim in enumerate(full) if index not in dims]
    source = "source" if call.at("values") is None else "values"
    draft.stretched(source, (*rest[:at], *i, *rest[at:]))
    return draft.rule(full, linear=[("self", source)], scratch=[_wider(call, full, full[dims[0]] if len(dims) == 1 else ())])


def gather_rule(call: Call) -> Rule | None:
    """`gather`, `scatter` and `scatter_add`. Other dims are shared where index and tensor have the same size."""
    whole, places, name = call.shape("self"), call.shape("index"), call.op.target.split(".")[1]
    if not whole or not places:
        return None
    draft, along = Draft(call), call.arguments["dim"] % len(whole)
    sources = [] if call.at("src") is None else [call.shape("src")]
    full: list[tuple[int, ...]] = []
    index: list[tuple[int, ...]] = []
    for dim, (size, wanted) in enumerate(zip(whole, places, strict=True)):
        if dim == along:
            looks_up = name == "gather"
            split = SUM if looks_up and call.dtypes[call.at("self") or 0] in REALS else WHOLE if looks_up else FREE
            full.append(draft.dim(size, split, ranged=True))
            index.append(draft.dim(wanted, FREE if looks_up else SUM if name == "scatter_add" else WHOLE))
        elif all(size == other for other in (wanted, *(shape[dim] for shape in sources))):
            full.append(draft.dim(size))
            index.append(full[-1])
        else:
            full.append(draft.dim(size, WHOLE))
            index.append(draft.dim(wanted, WHOLE))
    draft.put("self", tuple(full))
    draft.put("index", tuple(index))
    if sources and sources[0] == places:
        draft.put("src", tuple(index))
    elif sources:
        return None
    # Local indices, and two masks while they are made. An expanded index takes less, but a move may have filled it.
    local = Scratch(when=full[along], of=tuple(factor for dim in index for factor in dim), itemsize=8 + 2)
    if name == "gather":
        return draft.rule(tuple(index), linear=[("self",)], scratch=[local])
    copy = _wider(call, tuple(full), full[along])
    return draft.rule(tuple(full), linear=[("self", "src")] if sources else [], scratch=[local, copy])


def _wider(call: Call, dims: Dims, rows: tuple[int, ...]) -> Scratch:
    """Where rows are split, a member writes to a copy with one more row."""
    return Scratch(when=rows, of=tuple(factor for dim in dims for factor in dim), itemsize=call.itemsize("self"))


def one_hot_rule(call: Call) -> Rule | None:
    if call.arguments["num_classes"] < 0:
        return None  # the shape depends on the data
    draft = Draft(call)
    i = draft.dims(call.shape("self"))
    draft.put("self", i)
    return draft.rule((*i, draft.dim(call.arguments["num_classes"], ranged=True)))


def table_dim(call: Call, rank: int) -> int:
    """The one dim whose rows are looked up or written; it can be split only if it is the only one."""
    if call.op.target.startswith("aten.embedding"):
        return 0
    if "dim" in call.arguments:
        return int(call.arguments["dim"]) % rank
    return next(dim for dim, at in enumerate(call.all_at("indices")) if at is not None)


def own_rows(here: Here, dims: Dims, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices relative to the first local row, and which of them are local."""
    rows = dims[table_dim(here.call, len(dims))]
    size = here.size(rows)
    if "indices" in here.call.arguments and not here.call.op.target.startswith(
        "aten.embedding"
    ):  # negative ones count from the end
        indices = torch.where(indices < 0, indices + size * here.count(rows), indices)
    local = indices - here.start(rows)
    own = local >= 0
    own &= local < size
    return local, own
