"""What DTensor makes of a choice, on two ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode

from scrimp.capture.graph.graph import Op
from scrimp.layout import Layout
from scrimp.rules.core.call import bind
from scrimp.rules.core.schema_private import schema

Choice = tuple[Op, tuple[tuple[tuple[int, ...], str], ...], tuple[Layout, ...]]  # operator, inputs' shapes and dtypes, layouts


def placement(layout: Layout) -> Placement | None:
    """Of a layout on one axis; None if DTensor has none: a split minor factor."""
    if layout.partial:
        return Partial()
    factors, at = layout.factors or (1,) * len(layout.dims), 0
    for dim, count in enumerate(factors):
        if layout.dims[at]:
            return Shard(dim)
        if any(layout.dims[at : at + count]):
            return None
        at += count
    return Replicate()


def name(place: Placement | None) -> str:
    """DTensor has several kinds of parts of a sum, which for us are one."""
    return "parts of a sum" if isinstance(place, Partial) else str(place)


def known() -> set[Any]:
    """Operators that DTensor itself has a strategy for."""
    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    tables = ("op_strategy_funcs", "op_single_dim_strategy_funcs", "op_to_rules")
    return {each for table in tables for each in getattr(propagator, table, ())}


def propagated(choices: list[Choice]) -> list[list[str] | None]:
    """Of each choice the placements of the outputs, if DTensor runs it without moving anything."""
    mesh = init_device_mesh("cpu", (2,))
    return [_propagated(mesh, *choice) for choice in choices]


def _propagated(
    mesh: Any, op: Op, shapes: tuple[tuple[tuple[int, ...], str], ...], layouts: tuple[Layout, ...]
) -> list[str] | None:
    found = schema(op.target)
    if found is None or found.function not in known():
        return None  # it would take the operator apart, which takes long and shows what others make of it
    tensors = []
    for (shape, dtype), layout in zip(shapes, layouts, strict=True):
        place = placement(layout)
        assert place is not None
        local = [size // 2 if isinstance(place, Shard) and dim == place.dim else size for dim, size in enumerate(shape)]
        real = dtype.startswith("float")
        tensor = torch.ones(local) if real else torch.zeros(local, dtype=getattr(torch, dtype))
        tensors.append(DTensor.from_local(tensor, mesh, [place], run_check=False))
    call = bind(op)
    assert call is not None
    try:
        with CommDebugMode() as moves:
            outputs = call.run(call.filled(tensors))
    except Exception:  # it has no rule for the operator, or none that takes these
        return None
    if moves.get_total_counts():
        return None
    return [name(output.placements[0]) if isinstance(output, DTensor) else "" for output in outputs]
