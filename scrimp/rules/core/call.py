"""Binds a captured operator to torch's schema: arguments by name with defaults filled in, which of them are tensors, and the
call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from scrimp.capture import Named, Op, Ref, Value
from scrimp.rules.core.schema_private import schema


@dataclass(frozen=True, kw_only=True)
class Call:
    """`arguments` by the schema's names. A tensor appears as its index among `op.inputs`, wrapped in `At`."""

    op: Op
    arguments: Mapping[str, Any]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    made: tuple[tuple[int, ...] | None, ...]

    def at(self, name: str) -> int | None:
        """The input index of an argument; None if it is no tensor."""
        found = self.arguments.get(name)
        return found.index if isinstance(found, At) else None

    def all_at(self, name: str) -> tuple[int | None, ...]:
        """The same for an argument that is a list of tensors."""
        found = self.arguments[name]
        return tuple(each.index if isinstance(each, At) else None for each in found) if isinstance(found, tuple) else ()

    def shape(self, name: str) -> tuple[int, ...]:
        index = self.at(name)
        assert index is not None, f"{self.op.target}: '{name}' is not a tensor"
        return self.shapes[index]

    def itemsize(self, name: str) -> int:
        """Bytes of an element in a reduction of this tensor: at least float32."""
        index = self.at(name)
        assert index is not None
        return max(4, _dtype(self.dtypes[index]).itemsize)

    def filled(self, tensors: Sequence[Any]) -> dict[str, Any]:
        return {name: _filled(argument, tensors) for name, argument in self.arguments.items()}

    def run(self, arguments: Mapping[str, Any]) -> tuple[Any, ...]:
        return call(self.op.target, arguments)


@dataclass(frozen=True, kw_only=True)
class At:
    """An input, in `Call.arguments`."""

    index: int


def bind(op: Op, values: Mapping[str, Value] | None = None) -> Call | None:
    """None if torch has no such operator. Shapes are known only if values are given."""
    found, inputs = schema(op.target), 0
    if found is None:
        return None

    def placed(argument: Any) -> Any:
        nonlocal inputs
        if isinstance(argument, Ref):
            inputs += 1
            return At(index=inputs - 1)
        return tuple(map(placed, argument)) if isinstance(argument, tuple) else argument

    arguments = {of.name: of.default for of in found.arguments}
    for of, argument in zip(found.arguments, op.args, strict=False):
        arguments[of.name] = placed(argument)
    for name, argument in op.kwargs:
        arguments[name] = placed(argument)
    known = values or {}
    return Call(
        op=op,
        arguments=arguments,
        shapes=tuple(known[name].shape for name in op.inputs) if values is not None else (),
        dtypes=tuple(known[name].dtype for name in op.inputs) if values is not None else (),
        made=tuple(known[name].shape if name is not None and name in known else None for name in op.outputs),
    )


def with_literals(op: Op, changed: Callable[[Named], Named]) -> Op:
    """The operator with other torch objects among its arguments."""

    def inside(argument: Any) -> Any:
        if isinstance(argument, Named):
            return changed(argument)
        return tuple(map(inside, argument)) if isinstance(argument, tuple) else argument

    return replace(op, args=inside(op.args), kwargs=tuple((name, inside(value)) for name, value in op.kwargs))


def on_device(op: Op, device: str) -> Op:
    """The operator with its results on another device than that of the capture."""
    return with_literals(op, lambda each: replace(each, name=device) if each.what == "device" else each)


def call(target: str, arguments: Mapping[str, Any]) -> tuple[Any, ...]:
    found = schema(target)
    assert found is not None, target
    positional = [arguments[of.name] for of in found.arguments if not of.keyword]
    made = found.function(*positional, **{of.name: arguments[of.name] for of in found.arguments if of.keyword})
    return tuple(made) if isinstance(made, (tuple, list)) else (made,)


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype), name
    return found


def _filled(argument: Any, tensors: Sequence[Any]) -> Any:
    if isinstance(argument, At):
        return tensors[argument.index]
    if isinstance(argument, Named):
        return torch.device(argument.name) if argument.what == "device" else getattr(torch, argument.name)
    if isinstance(argument, tuple):
        return [_filled(each, tensors) for each in argument]
    return argument
