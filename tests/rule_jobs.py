"""What DTensor makes of a choice, on two ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode

from scrimp.capture._graph import Op
from scrimp.layout import Layout
from scrimp.rules._call import bind

Choice = tuple[Op, tuple[tuple[int, ...], ...], tuple[Layout, ...]]  # operator, inputs' shapes, their layouts


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


def propagated(choices: list[Choice]) -> list[list[str] | None]:
    """Of each choice the placements of the outputs, if DTensor runs it without moving anything."""
    mesh = init_device_mesh("cpu", (2,))
    return [_propagated(mesh, *choice) for choice in choices]


def _propagated(mesh: Any, op: Op, shapes: tuple[tuple[int, ...], ...], layouts: tuple[Layout, ...]) -> list[str] | None:
    tensors = []
    for shape, layout in zip(shapes, layouts, strict=True):
        place = placement(layout)
        assert place is not None
        local = [size // 2 if isinstance(place, Shard) and dim == place.dim else size for dim, size in enumerate(shape)]
        whole = op.target == "aten.embedding.default" and len(tensors) == 1
        tensor = torch.zeros(local, dtype=torch.int64) if whole else torch.ones(local)
        tensors.append(DTensor.from_local(tensor, mesh, [place], run_check=False))
    call = bind(op)
    assert call is not None
    with CommDebugMode() as moves:
        outputs = call.run(call.filled(tensors))
    if moves.get_total_counts():
        return None
    return [name(output.placements[0]) for output in outputs]
