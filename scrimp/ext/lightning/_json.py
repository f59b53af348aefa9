"""Values of Lightning's state as JSON, and back to the same types: what JSON does not have is a mapping with the key `TAG`."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from math import isfinite
from pathlib import PurePath
from typing import Any

import torch

from scrimp.errors import CheckpointError

TAG = "__scrimp__"
MOST_NUMBERS = 4096  # of a tensor in JSON


def as_json(value: Any, where: str) -> Any:
    """Raises a `CheckpointError` that names `where` for a value that JSON cannot hold."""
    if isinstance(value, Enum):
        return as_json(value.value, where)
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if isfinite(value) else {TAG: "float", "text": str(value)}
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, torch.Tensor):
        return _tensor(value, where)
    if isinstance(value, list):
        return [as_json(item, f"{where}[{k}]") for k, item in enumerate(value)]
    if isinstance(value, tuple | set | frozenset):
        kind = "tuple" if isinstance(value, tuple) else "set"
        return {TAG: kind, "items": [as_json(item, f"{where}[{k}]") for k, item in enumerate(value)]}
    if isinstance(value, Mapping):
        if TAG not in value and all(type(key) is str for key in value):
            return {key: as_json(item, f"{where}[{key!r}]") for key, item in value.items()}
        pairs = [[as_json(key, f"a key of {where}"), as_json(item, f"{where}[{key!r}]")] for key, item in value.items()]
        return {TAG: "mapping", "items": pairs}
    item = getattr(value, "item", None)  # a number of numpy
    if callable(item) and type(value).__module__ == "numpy" and getattr(value, "ndim", 1) == 0:
        return as_json(item(), where)
    raise CheckpointError(
        f"{where} is a {type(value).__name__}, which JSON cannot hold: a checkpoint of Budget has numbers, text, lists, "
        "mappings and small tensors, because it is not pickled"
    )


def _tensor(value: torch.Tensor, where: str) -> dict[str, Any]:
    if value.numel() > MOST_NUMBERS:
        raise CheckpointError(
            f"{where} is a tensor of {value.numel()} elements, and a checkpoint of Budget holds at most {MOST_NUMBERS} outside "
            "of the model; make it a buffer of the LightningModule"
        )
    numbers = [as_json(number, where) for number in value.detach().cpu().reshape(-1).tolist()]
    return {TAG: "tensor", "dtype": str(value.dtype).removeprefix("torch."), "shape": [*value.shape], "items": numbers}


def from_json(value: Any) -> Any:
    if isinstance(value, list):
        return [from_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(TAG)
    if kind is None:
        return {key: from_json(item) for key, item in value.items()}
    if kind == "float":
        return float(value["text"])
    items = [from_json(item) for item in value["items"]]
    if kind == "tensor":
        return torch.tensor(items, dtype=getattr(torch, value["dtype"])).reshape(value["shape"])
    if kind == "mapping":
        return dict(items)
    return tuple(items) if kind == "tuple" else {*items}
