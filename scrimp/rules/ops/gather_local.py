"""The local functions of members that hold a range of the rows of a lookup or a write."""

from __future__ import annotations

from typing import Any

import torch

from scrimp.rules.core.local_context import Here, family
from scrimp.rules.core.rule import Dims
from scrimp.rules.ops.gather import (
    embedding_backward_rule,
    embedding_rule,
    gather_rule,
    index_put_rule,
    index_rule,
    one_hot_rule,
    own_rows,
    table_dim,
)


def _split_rows(here: Here, dims: Dims) -> bool:
    return any(here.count(dim) > 1 for dim in dims) and here.count(dims[table_dim(here.call, len(dims))]) > 1


def _where(given: dict[str, Any]) -> tuple[str, torch.Tensor]:
    """The one argument that holds the indices."""
    for name in ("index", "indices"):
        if isinstance(given.get(name), torch.Tensor):
            return name, given[name]
    return "indices", next(each for each in given["indices"] if each is not None)


def _thin(index: torch.Tensor) -> torch.Tensor:
    """Repeated entries once: an index that is expanded over the dims of a row stays as small as it is."""
    for dim, stride in enumerate(index.stride()):
        index = index.narrow(dim, 0, 1) if not stride and index.shape[dim] else index
    return index


def _with(given: dict[str, Any], name: str, index: torch.Tensor) -> dict[str, Any]:
    if isinstance(given[name], torch.Tensor):
        return {**given, name: index}
    return {**given, name: [None if each is None else index for each in given[name]]}


def _look_up(here: Here, given: dict[str, Any]) -> tuple[Any, ...]:
    """Rows of other members are zeros."""
    table = "weight" if here.call.at("weight") is not None else "self"
    dims = here.of(table)
    if not _split_rows(here, dims):
        return here.call.run(given)
    name, index = _where(given)
    local, own = own_rows(here, dims, _thin(index))
    (found,) = here.call.run(_with(given, name, local.masked_fill_(~own, 0).expand(index.shape)))
    if here.call.op.target != "aten.gather.default":
        at = table_dim(here.call, len(dims))
        shape = index.shape or (1,) if here.call.op.target == "aten.index_select.default" else index.shape
        own = own.expand(index.shape).reshape(*shape, *[1] * (found.dim() - at - len(shape)))
    return (found.masked_fill_(~own, 0),)


def _write(here: Here, given: dict[str, Any]) -> tuple[Any, ...]:
    """Rows of other members go to one extra row, which is then dropped."""
    dims = here.of("self")
    if not _split_rows(here, dims):
        return here.call.run(given)
    at, (name, index) = table_dim(here.call, len(dims)), _where(given)
    local, own = own_rows(here, dims, _thin(index))
    rows, size = given["self"], given["self"].shape[at]
    shape = list(rows.shape)
    shape[at] = 1
    wider = torch.cat([rows, rows.new_zeros(shape)], at)
    (made,) = here.call.run(_with({**given, "self": wider}, name, local.masked_fill_(~own, size).expand(index.shape)))
    return (made.narrow(at, 0, size),)


def _embedding_backward(here: Here, given: dict[str, Any]) -> tuple[Any, ...]:
    """The dropped row also takes the padding index, which has no gradient."""
    dims = here.rule.outputs[0]
    assert dims is not None
    if here.count(dims[0]) == 1:
        return here.call.run(given)
    indices, size = given["indices"], here.size(dims[0])
    local, own = own_rows(here, dims, indices)
    own = own & (indices != given["padding_idx"])
    local = local.masked_fill(~own, size)
    (made,) = here.call.run({**given, "indices": local, "num_weights": size + 1, "padding_idx": size})
    return (made.narrow(0, 0, size),)


def _one_hot(here: Here, given: dict[str, Any]) -> tuple[Any, ...]:
    dims = here.rule.outputs[0]
    assert dims is not None
    start = here.start(dims[-1])
    classes = torch.arange(start, start + here.size(dims[-1]), device=given["self"].device)
    return ((given["self"].unsqueeze(-1) == classes).to(torch.int64),)


_WRITERS = ("aten.scatter.src", "aten.scatter.value", "aten.scatter_add.default")
_ADDERS = ("aten.index_put.default", "aten.index_add.default", "aten._unsafe_index_put.default")
_READERS = ("aten.index.Tensor", "aten._unsafe_index.Tensor", "aten.index_select.default")

GATHER = family(
    {
        "aten.embedding.default": embedding_rule,
        "aten.embedding_dense_backward.default": embedding_backward_rule,
        **dict.fromkeys(_READERS, index_rule),
        **dict.fromkeys(_ADDERS, index_put_rule),
        **dict.fromkeys(("aten.gather.default", *_WRITERS), gather_rule),
        "aten.one_hot.default": one_hot_rule,
    },
    addends=dict.fromkeys((*_ADDERS, "aten.scatter_add.default"), "self"),
    runs={
        **dict.fromkeys(("aten.embedding.default", "aten.gather.default", *_READERS), _look_up),
        **dict.fromkeys((*_WRITERS, *_ADDERS), _write),
        "aten.embedding_dense_backward.default": _embedding_backward,
        "aten.one_hot.default": _one_hot,
    },
)
