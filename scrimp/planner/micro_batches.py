"""Cuts a micro-batch out of an example batch: its first rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from scrimp.errors import PlanError

Example = Sequence[Any] | Mapping[str, Any]


def rows_of(example: Example) -> int:
    """The batch size: the first dim of the first tensor that has one."""
    return next((tensor.shape[0] for tensor in _tensors(example) if tensor.dim()), 1)


def micro_batch(example: Example, count: int) -> Example:
    """One of `count` micro-batches. Tensors without batch rows, such as a table of positions, stay as they are."""
    rows = rows_of(example)
    if rows % count:
        raise PlanError(f"{rows} rows cannot be split into {count} equal micro-batches")

    def part(item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            return item[: rows // count] if item.dim() and item.shape[0] == rows else item
        if isinstance(item, Mapping):
            return {name: part(each) for name, each in item.items()}
        if isinstance(item, list | tuple):
            return type(item)(map(part, item)) if not hasattr(item, "_fields") else type(item)(*map(part, item))
        return item

    if count == 1:
        return example
    return {name: part(item) for name, item in example.items()} if isinstance(example, Mapping) else tuple(map(part, example))


def _tensors(item: Any) -> Iterator[torch.Tensor]:
    if isinstance(item, torch.Tensor):
        yield item
    elif isinstance(item, Mapping):
        yield from _tensors(list(item.values()))
    elif isinstance(item, list | tuple):
        for each in item:
            yield from _tensors(each)
