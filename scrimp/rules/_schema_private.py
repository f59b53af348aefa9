"""What torch says about an operator, by private names: its arguments with their defaults, and its marks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True)
class Argument:
    name: str
    default: Any
    keyword: bool


@dataclass(frozen=True, kw_only=True)
class Schema:
    """`draws`: makes random numbers. `writes`: into its operands."""

    function: Callable[..., Any]
    arguments: tuple[Argument, ...]
    pointwise: bool
    draws: bool
    writes: bool


@cache
def schema(target: str) -> Schema | None:
    """Of "aten.mm.default"; None if this torch has no such operator."""
    found: Any = torch.ops
    for part in target.split("."):
        found = getattr(found, part, None)
    if not isinstance(found, torch._ops.OpOverload):
        return None
    arguments = (
        Argument(name=each.name, default=each.default_value, keyword=each.kwarg_only) for each in found._schema.arguments
    )
    return Schema(
        function=found,
        arguments=tuple(arguments),
        pointwise=torch.Tag.pointwise in found.tags,
        draws=torch.Tag.nondeterministic_seeded in found.tags,
        writes=found._schema.is_mutable,
    )
