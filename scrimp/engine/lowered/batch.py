"""This rank's part of a batch: cut out of the global batch, or given as it is. Shapes tell which."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch

from scrimp.engine.lowered.program import Program
from scrimp.errors import RunError
from scrimp.layout import Mesh
from scrimp.lower import cut, local_shape, part_of
from scrimp.planner import Placed, unsplit


@dataclass(frozen=True, kw_only=True)
class BatchPart:
    """The part of one tensor of the batch that a rank takes. `index`: slices of the global tensor, one for each dim; None if the
    part is not a box of it. `place`: the placement by which the engine cuts."""

    shape: tuple[int, ...]
    of: tuple[int, ...]
    index: tuple[slice, ...] | None
    place: Placed


def parts_of(program: Program, rank: int) -> dict[str, BatchPart]:
    """By tensor of the batch, of a whole step: all its micro-batches."""
    if program.staged is not None:
        return _all_rows(program)
    mesh, count, found = program.plan.mesh, program.micro_batches, {}
    for each in program.plan.batch:
        place = program.part.pieces[0].batch[each.name]
        local = local_shape(place, mesh)
        found[each.name] = BatchPart(
            shape=(local[0] * count, *local[1:]) if local else (),
            of=(each.shape[0] * count, *each.shape[1:]) if each.shape else (),
            index=_box(place, mesh, rank) if count == 1 else None,
            place=place,
        )
    return found


def _all_rows(program: Program) -> dict[str, BatchPart]:
    """Under pipeline stages every rank takes all rows: each piece cuts its part of a micro-batch out of them. A tensor without
    rows of the batch stays whole."""
    rows, found = next((each.shape[0] for each in program.plan.batch if each.shape), 1), {}
    for each in program.plan.batch:
        several = bool(each.shape) and each.shape[0] == rows
        of = (each.shape[0] * program.micro_batches, *each.shape[1:]) if several else each.shape
        found[each.name] = BatchPart(shape=of, of=of, index=tuple(slice(0, size) for size in of), place=unsplit(each.shape))
    return found


def _box(place: Placed, mesh: Mesh, rank: int) -> tuple[slice, ...] | None:
    """A tile is a box where only the first factor of a dim that is more than 1 is split."""
    index = []
    for dim in place.dims:
        sizes = [(size, axes) for size, axes in dim if size > 1 or axes]
        if any(axes for _, axes in sizes[1:]):
            return None
        start, length = part_of(prod(size for size, _ in dim), sizes[0][1] if sizes else (), mesh, rank)
        index.append(slice(start, start + length))
    return tuple(index)


def micro_batches(
    program: Program,
    parts: Mapping[str, BatchPart],
    given: Mapping[str, torch.Tensor],
    rank: int,
    count: int,
) -> list[dict[str, torch.Tensor]]:
    """This rank's part of each micro-batch, by name. `count`: micro-batches in this batch."""
    kinds = set()
    for name, tensor in given.items():
        whole, mine = (_scaled(shape, count, program.micro_batches) for shape in (parts[name].of, parts[name].shape))
        shape = tuple(tensor.shape)
        if shape not in (whole, mine):
            raise RunError(
                f"'{name}' of the batch has the shape {shape}: under this plan it is {whole}, the global batch, the same on "
                f"every rank; or {mine}, this rank's part (engine.batch_part says which)"
            )
        if whole != mine:
            kinds.add(shape == whole)
    if len(kinds) > 1:
        raise RunError("some tensors of the batch are global, others are this rank's part: give all of one kind")
    found: list[dict[str, torch.Tensor]] = [{} for _ in range(count)]
    for name, tensor in given.items():
        cutting = tuple(tensor.shape) != _scaled(parts[name].shape, count, program.micro_batches)
        for k, part in enumerate(tensor.chunk(count) if count > 1 else (tensor,)):
            found[k][name] = cut(part, parts[name].place, program.plan.mesh, rank) if cutting else part
    return found


def _scaled(shape: tuple[int, ...], count: int, all_of: int) -> tuple[int, ...]:
    return (shape[0] * count // all_of, *shape[1:]) if shape else ()
