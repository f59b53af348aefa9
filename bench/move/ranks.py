"""Moves that are really made, on 8 gloo processes: wall time, values, and what the allocator holds at most.

`wall` and `allocation` run on every rank of a pool; the rest says which problems they are given. DTensor gets what it
needs to be at its best: no autograd, a plan that is cached when the clock starts, and a global shape it need not ask for.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache
from math import log2, prod
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.profiler import ProfilerActivity, profile

from bench.move.counts import COLLECTIVES, DEFAULT, DIRECT, ITEMSIZE, MIN_COST, NAIVE
from bench.move.problems import TABLE, MoveProblem
from scrimp.ext import dtensor_plans
from scrimp.layout import Box, Layout, Mesh
from scrimp.move import synthesize

CONTENDERS = (COLLECTIVES, DIRECT, DEFAULT, MIN_COST, NAIVE)
DONATED = (f"{COLLECTIVES}, donated", f"{DIRECT}, donated")
LOCAL_NBYTES = 32 << 20  # the larger of source and target tile when allocation is measured

Move = Callable[..., torch.Tensor]


def problems() -> tuple[MoveProblem, ...]:
    """Those of the table that DTensor's public API can write: the axes of every dim stand in the mesh's order."""

    def in_order(problem: MoveProblem, text: str) -> bool:
        places = [[problem.mesh.names.index(axis) for axis in axes] for axes in Layout.parse(text).dims]
        return all(place == sorted(place) for place in places)

    return tuple(p for p in TABLE if in_order(p, p.src) and in_order(p, p.dst))


def with_global_size(problem: MoveProblem, nbytes: int) -> MoveProblem:
    """The problem on an array of so many bytes, a power of two, with sides as even as can be."""
    bits, rank = int(log2(nbytes // ITEMSIZE)), len(problem.shape)
    return problem._replace(shape=tuple(2 ** (bits // rank + (dim < bits % rank)) for dim in range(rank)))


def with_local_size(problem: MoveProblem, nbytes: int) -> MoveProblem:
    """The problem on an array whose larger tile, of source and target, has so many bytes."""
    tiles = min(prod(Layout.parse(end).counts(problem.mesh)) for end in (problem.src, problem.dst))
    return with_global_size(problem, tiles * nbytes)


def same_program(problem: MoveProblem) -> bool:
    """Whether scrimp has no better with direct exchange: then its two times differ by chance alone."""
    _, mesh, shape, src, dst = problem
    return synthesize(shape, mesh, src, dst, direct=False) == synthesize(shape, mesh, src, dst, direct=True)


def local_nbytes(problem: MoveProblem) -> tuple[int, int]:
    """Bytes of a source and of a target tile."""
    source, target = (Layout.parse(end).local_numel(problem.shape, problem.mesh) * ITEMSIZE for end in (problem.src, problem.dst))
    return source, target


def promised_nbytes(problem: MoveProblem, *, donated: bool) -> int:
    """The most that a move of scrimp may hold: two of the larger tile and a stage, and the input where it is kept.
    The stage is written out here, so that a change of it in the package shows."""
    source, target = local_nbytes(problem)
    larger = max(source, target)
    return 2 * larger + max(1 << 20, larger // 8) + (0 if donated else source)


# What follows runs on the ranks.


def wall(problem: MoveProblem, repeats: int) -> dict[str, Any]:
    """Seconds of each call of each contender, in turns after a warm-up, and which of them gave wrong values."""
    moves, rank = _moves(problem), dist.get_rank()
    local, want = (_numbers(problem.shape, _tile(problem, end, rank)) for end in (problem.src, problem.dst))
    seconds: dict[str, list[float]] = {name: [] for name in moves}
    wrong = []
    with torch.no_grad():
        for name, move in moves.items():
            out = move(local)
            if out.shape != want.shape or not torch.equal(out, want):
                wrong.append(name)
            del out
        for turn in range(repeats):
            names = [*CONTENDERS[turn % len(moves) :], *CONTENDERS[: turn % len(moves)]]  # none is always after the same
            for name in names:
                dist.barrier()
                start = time.perf_counter()
                out = moves[name](local)
                seconds[name].append(time.perf_counter() - start)
                dist.barrier()
                del out  # after the barrier, so that giving memory back costs nobody time
    return {"seconds": seconds, "wrong": wrong}


def allocation(problem: MoveProblem) -> dict[str, int]:
    """The most bytes that torch's allocator held on this rank during each move, the input among them."""
    moves, rank = _moves(problem), dist.get_rank()
    shape = [stop - start for start, stop in _tile(problem, problem.src, rank)]
    asked: list[tuple[str, Move, dict[str, bool]]] = [(name, move, {}) for name, move in moves.items()]
    asked += [(name, moves[kept], {"donate": True}) for name, kept in zip(DONATED, (COLLECTIVES, DIRECT), strict=True)]
    peaks = {}
    with torch.no_grad():
        for name, move, options in asked:
            dist.barrier()
            with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
                local = torch.empty(shape).fill_(1)  # inside, for what was there before is unknown to the profiler
                out = move(local, **options)
            del local, out
            peaks[name] = _peak(seen)
    return peaks


def _peak(seen: profile) -> int:
    events: list[Any] = seen.profiler.kineto_results.events()  # type: ignore[union-attr]
    live = peak = 0
    for event in sorted((event for event in events if event.name() == "[memory]"), key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


def _moves(problem: MoveProblem) -> dict[str, Move]:
    """The contenders by name; each takes this rank's source tile and returns its target tile."""
    logging.getLogger("torch").setLevel(logging.ERROR)  # DTensor warns of gloo's missing all-to-all on every rank
    _, mesh, shape, src, dst = problem
    private = dtensor_plans._private()
    private.clear_redistribute_planner_cache()
    stride = torch.empty(shape, device="meta").stride()

    def dtensor(device_mesh: DeviceMesh, *, min_cost: bool, by_way_of: Sequence[Sequence[Placement]] = ()) -> Move:
        start, end = _placements(mesh, src), _placements(mesh, dst)

        def move(local: torch.Tensor) -> torch.Tensor:
            array = DTensor.from_local(local, device_mesh, start, run_check=False, shape=torch.Size(shape), stride=stride)
            with private.use_min_cost_redistribution_plan() if min_cost else nullcontext():
                for placements in (*by_way_of, end):
                    array = array.redistribute(placements=placements)
            return array.to_local()

        return move

    gathered, device_mesh = [Replicate()] * len(mesh.names), _device_mesh(mesh)
    moves: dict[str, Move] = {
        COLLECTIVES: synthesize(shape, mesh, src, dst, direct=False).run,
        DIRECT: synthesize(shape, mesh, src, dst, direct=True).run,
        DEFAULT: dtensor(device_mesh, min_cost=False),
        MIN_COST: dtensor(_renamed(device_mesh), min_cost=True),
        NAIVE: dtensor(device_mesh, min_cost=False, by_way_of=[gathered]),
    }
    return moves


@cache
def _device_mesh(mesh: Mesh) -> DeviceMesh:
    return init_device_mesh("cpu", tuple(size for _, size in mesh.axes), mesh_dim_names=mesh.names)


@cache
def _renamed(device_mesh: DeviceMesh) -> DeviceMesh:
    """The same devices and groups by other names: torch's cache of plans does not ask which planner made one, so that
    each planner needs a mesh of its own to have its plans cached."""
    names = tuple(f"{name}_again" for name in device_mesh.mesh_dim_names or ())
    return DeviceMesh.from_group(device_mesh.get_all_groups(), "cpu", mesh=device_mesh.mesh, mesh_dim_names=names)


def _placements(mesh: Mesh, text: str) -> list[Placement]:
    dim_of = {axis: dim for dim, axes in enumerate(Layout.parse(text).dims) for axis in axes}
    return [Shard(dim_of[axis]) if axis in dim_of else Replicate() for axis in mesh.names]


def _tile(problem: MoveProblem, text: str, rank: int) -> Box:
    return Layout.parse(text).tile(problem.shape, problem.mesh, rank)


def _numbers(shape: Sequence[int], box: Box) -> torch.Tensor:
    """A tile of the array 0, 1, 2, ...; float32 holds each exactly up to 2**24, which is 64 MiB of them."""
    assert prod(shape) <= 2**24
    part = torch.zeros([stop - start for start, stop in box])
    stride = prod(shape)
    for dim, (size, (start, stop)) in enumerate(zip(shape, box, strict=True)):
        stride //= size
        part += (torch.arange(start, stop, dtype=torch.float32) * stride).reshape(
            [-1 if d == dim else 1 for d in range(len(box))]
        )
    return part
