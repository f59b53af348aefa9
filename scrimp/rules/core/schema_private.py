"""Torch's schema of an operator, from private names: its arguments with their defaults, and its tags."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from scrimp.rules.core.attention_private import FUNCTIONS


@dataclass(frozen=True, kw_only=True)
class Argument:
    """`kind`: its type in torch's notation: "Tensor", "Optional[Tensor]", "List[int]", "number". `needed`: it has no default."""

    name: str
    default: Any
    keyword: bool
    kind: str = "Tensor"
    needed: bool = False


@dataclass(frozen=True, kw_only=True)
class Schema:
    """`function`: the operator, on the device of its operands. `draws`: makes random numbers. `writes`: into its operands."""

    function: Callable[..., Any]
    arguments: tuple[Argument, ...]
    pointwise: bool
    draws: bool
    writes: bool


def schema(target: str) -> Schema | None:
    """The schema of "aten.mm.default"; None if no such operator is registered, which a later import may change."""
    try:
        return _schema(target)
    except LookupError:
        return None


@cache
def _schema(target: str) -> Schema:
    found: Any = torch.ops
    for part in target.split("."):
        found = getattr(found, part, None)
    if not isinstance(found, torch._ops.OpOverload):
        raise LookupError(target)
    arguments = (
        Argument(
            name=each.name,
            default=each.default_value,
            keyword=each.kwarg_only,
            kind=str(each.type),
            needed=not each.has_default_value(),
        )
        for each in found._schema.arguments
    )
    return Schema(
        function=FUNCTIONS.get(target, found),
        arguments=tuple(arguments),
        pointwise=torch.Tag.pointwise in found.tags,
        draws=torch.Tag.nondeterministic_seeded in found.tags and target not in FUNCTIONS,
        writes=found._schema.is_mutable,
    )


def all_targets() -> tuple[str, ...]:
    """Every operator of torch, and of loaded libraries: "aten.mm.default"."""
    names = (name.replace("::", ".") for name in torch._C._dispatch_get_all_op_names())
    return tuple(sorted(name if name.count(".") > 1 else f"{name}.default" for name in names))
