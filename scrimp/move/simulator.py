"""Simulates all ranks in one process, by the definition of the steps: the oracle for the executor and the checker.

A step's definition gives the allowed senders of each rank, and the global indices that the rank holds after it. A rank's new tile
is assembled, index by index, from the old tiles of its senders; every index must be given, and where values are summed, each
summand exactly once. The code does not follow how `run` packs or sends.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

import numpy as np

from scrimp.errors import MoveError
from scrimp.layout import Box, Layout, intersect
from scrimp.move.program import Program, Step


def simulate(program: Program, array: np.ndarray) -> list[np.ndarray]:
    if array.shape != program.shape:
        raise MoveError(f"simulate was given an array of {array.shape}, the program {program} is for {program.shape}")
    locals_ = scatter(program, array)
    for step in program.steps:
        locals_ = [_after(program, step, locals_, rank) for rank in range(program.mesh.size)]
    return locals_


def scatter(program: Program, array: np.ndarray) -> list[np.ndarray]:
    """The tiles of an array in the source layout. A partial sum gets summands that differ on every device and add up to the array
    exactly (integers, so that even floats do)."""
    mesh, src = program.mesh, program.src
    summands = prod(mesh.axis_size(axis) for axis in src.partial)
    out = []
    for rank in range(mesh.size):
        index = 0
        for axis in src.partial:
            index = index * mesh.axis_size(axis) + mesh.coordinate(rank, axis)
        tile = array[_slices(src.tile(program.shape, mesh, rank))]
        if summands > 1:
            rest = summands * (summands - 1) // 2
            tile = (tile - rest) if index == 0 else np.full_like(tile, index)
        out.append(np.array(tile))
    return out


def expected(program: Program, array: np.ndarray) -> list[np.ndarray]:
    """Each rank's final tile, if the target has no partial sums."""
    return [array[_slices(program.dst.tile(program.shape, program.mesh, rank))] for rank in range(program.mesh.size)]


def _after(program: Program, step: Step, old: list[np.ndarray], rank: int) -> np.ndarray:
    box = _tile(program, step.after, rank)
    new = np.zeros([stop - start for start, stop in box], dtype=old[rank].dtype)
    given = np.zeros(new.shape, dtype=np.int64)
    for giver in _givers(program, step, rank):
        has = _tile(program, step.before, giver)
        both = intersect(has, box)
        new[_slices(both, box)] += old[giver][_slices(both, has)]
        given[_slices(both, box)] += 1
    wanted = prod(program.mesh.axis_size(axis) for axis in step.axes) if "reduce" in step.kind else 1
    if (given != wanted).any():
        where = tuple(int(k) for k in np.argwhere(given != wanted)[0])
        raise MoveError(
            f"step ({step.describe(program.mesh)}) gives rank {rank} element {where} of its tile "
            f"{int(given[where])} times instead of {wanted}: {program}"
        )
    return new


def _givers(program: Program, step: Step, rank: int) -> Iterable[int]:
    """The ranks that a rank receives from. Where several hold the same values, one of them."""
    mesh = program.mesh
    if step.kind == "slice":
        return [rank]
    if step.axes:
        return mesh.group(rank, step.axes)
    # permute, exchange, direct: from any rank, but each value once; and partial sums stay in their own slice of the mesh.
    seen: set[Box] = set()
    givers = []
    for giver in [rank, *range(mesh.size)]:
        same = all(mesh.coordinate(giver, axis) == mesh.coordinate(rank, axis) for axis in step.before.partial)
        tile = _tile(program, step.before, giver)
        if same and tile not in seen and all(stop > start for start, stop in tile):
            seen.add(tile)
            givers.append(giver)
    return givers


def _tile(program: Program, layout: Layout, rank: int) -> Box:
    return layout.tile(program.shape, program.mesh, rank, program.padded)


def _slices(box: Box, inside: Box | None = None) -> tuple[slice, ...]:
    """A box as an index, into the whole array or into the array that holds another box."""
    offsets = [start for start, _ in inside] if inside else [0] * len(box)
    return tuple(slice(start - offset, stop - offset) for (start, stop), offset in zip(box, offsets, strict=True))
