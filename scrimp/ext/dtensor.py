"""`redistribute(dtensor, placements)`: replaces `DTensor.redistribute` by a scrimp move.

DTensor splits a dim over several mesh dims by nested chunks: 5 rows over 2 x 2 devices are 3 + 2, then 2 + 1 and 1 + 1, where
scrimp's tiles are 2 + 2 + 1 + 0. Where the two agree, the move is a scrimp program. Where they do not, it is one direct exchange
between DTensor's own boxes, after the sums.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from scrimp.cluster import Cluster
from scrimp.errors import MoveError
from scrimp.ext._dtensor_private import shard_order
from scrimp.layout import AXIS_NAME, Box, Layout, Mesh
from scrimp.move import run_between, run_program, synthesize


def redistribute(
    dtensor: DTensor, placements: Sequence[Placement], *, cluster: Cluster | None = None, direct: bool = True
) -> DTensor:
    """The same logical tensor with other placements; differentiable. Never holds more than the larger of the two
    local tensors besides what it sends and receives, and moves no more bytes than it must.

    >>> import scrimp, torch
    >>> import torch.distributed as dist
    >>> from torch.distributed.tensor import DeviceMesh, Replicate, Shard, distribute_tensor
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> weight = distribute_tensor(torch.ones(4, 4), DeviceMesh("cpu", [0]), [Shard(0)])
    >>> scrimp.redistribute(weight, [Replicate()]).placements
    (Replicate(),)
    >>> dist.destroy_process_group()
    """
    if not isinstance(dtensor, DTensor):
        raise MoveError(f"redistribute takes a DTensor, not {type(dtensor).__name__}; for plain tensors see synthesize")
    goal = _normal(placements, dtensor)
    if any(_special(placement) for placement in dtensor.placements):
        # Norms, masked sums and other reductions finish themselves, each on its own mesh dim.
        plain = [Replicate() if _special(placement) else placement for placement in dtensor.placements]
        dtensor = dtensor.redistribute(placements=plain)
    result: DTensor = _Redistribute.apply(dtensor, goal, cluster, direct)  # type: ignore[no-untyped-call]
    return result


class _Redistribute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dtensor: DTensor, goal: tuple[Placement, ...], cluster: Any, direct: bool) -> DTensor:
        ctx.source = tuple(dtensor.placements)
        ctx.options = (cluster, direct)
        local = _move(dtensor, goal, cluster, direct)
        return DTensor.from_local(local, dtensor.device_mesh, goal, run_check=False, shape=dtensor.shape, stride=dtensor.stride())

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """The gradient's layout is the source's with partial sums turned into replicas."""
        goal = tuple(Replicate() if placement.is_partial() else placement for placement in ctx.source)
        cluster, direct = ctx.options
        return redistribute(grads[0], goal, cluster=cluster, direct=direct), None, None, None


def _special(placement: Placement) -> bool:
    return isinstance(placement, Partial) and type(placement) is not Partial


def _normal(placements: Sequence[Placement], dtensor: DTensor) -> tuple[Placement, ...]:
    mesh = dtensor.device_mesh
    if len(placements) != mesh.ndim:
        raise MoveError(f"{len(placements)} placements {tuple(placements)} for a device mesh of {mesh.ndim} dims {mesh}")
    goal: list[Placement] = []
    for axis, (want, have) in enumerate(zip(placements, dtensor.placements, strict=True)):
        if type(want) is Shard:
            dim = want.dim + dtensor.ndim if want.dim < 0 else want.dim
            if not 0 <= dim < dtensor.ndim:
                raise MoveError(
                    f"placement {want} on mesh dim {axis}: the tensor of shape {tuple(dtensor.shape)} has no such dim"
                )
            want = Shard(dim)
        elif _special(want) or (isinstance(want, Partial) and want != have):
            raise MoveError(f"mesh dim {axis}: cannot turn {have} into {want}; a move reduces partial sums or keeps them")
        elif not isinstance(want, (Replicate, Partial)):
            raise MoveError(f"mesh dim {axis}: scrimp cannot place {want}; it supports Shard, Replicate and Partial")
        goal.append(want)
    return tuple(goal)


def _move(dtensor: DTensor, goal: tuple[Placement, ...], cluster: Cluster | None, direct: bool) -> torch.Tensor:
    device_mesh, shape = dtensor.device_mesh, tuple(dtensor.shape)
    if device_mesh.get_coordinate() is None:
        raise MoveError(f"rank {dist.get_rank()} is not in the device mesh {device_mesh}")
    mesh = _mesh(device_mesh)
    # Products, minima and maxima are reduced first, one mesh dim at a time; the move reduces sums and means.
    local, have = _finish_other_reductions(dtensor, goal)
    source = _layout(mesh, have, len(shape), shard_order(dtensor))
    target = _layout(mesh, goal, len(shape), None)
    boxes = [[_nested_box(layout, shape, mesh, rank) for rank in range(mesh.size)] for layout in (source, target)]
    flat = all(
        box == layout.tile(shape, mesh, rank)
        for layout, of_layout in zip((source, target), boxes, strict=True)
        for rank, box in enumerate(of_layout)
    )
    if flat:
        program = synthesize(shape, mesh, source, target, dtype=local.dtype, cluster=cluster, direct=direct)
        local = run_program(program, local, group=device_mesh)
    else:
        key = hashlib.sha256(f"{mesh} {shape} {source} {target} {local.dtype}".encode()).hexdigest()
        sums = tuple(axis for axis in source.partial if axis not in target.partial)
        local = run_between(mesh, boxes[0], boxes[1], local, sums=sums, key=key, group=device_mesh)
    means = [
        mesh.axes[axis][1]
        for axis, (old, new) in enumerate(zip(have, goal, strict=True))
        if isinstance(old, Partial) and old.reduce_op == "avg" and old != new
    ]
    if means and not local.is_floating_point() and not local.is_complex():
        raise MoveError(f"a mean of {local.dtype} is no {local.dtype}; cast to a floating-point dtype first")
    return local / prod(means) if means else local


def _finish_other_reductions(dtensor: DTensor, goal: tuple[Placement, ...]) -> tuple[torch.Tensor, list[Placement]]:
    local, have = dtensor.to_local(), list(dtensor.placements)
    for axis, (placement, want) in enumerate(zip(dtensor.placements, goal, strict=True)):
        if isinstance(placement, Partial) and placement.reduce_op not in ("sum", "avg") and placement != want:
            op = {"max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN, "product": dist.ReduceOp.PRODUCT}.get(placement.reduce_op)
            if op is None:
                raise MoveError(f"mesh dim {axis}: {placement} has a reduction that scrimp does not know")
            local = local.clone(memory_format=torch.contiguous_format)
            dist.all_reduce(local, op, group=dtensor.device_mesh.get_group(axis))
            have[axis] = Replicate()
    return local, have


def _mesh(device_mesh: DeviceMesh) -> Mesh:
    names = device_mesh.mesh_dim_names or ()
    if len(set(names)) != device_mesh.ndim or not all(AXIS_NAME.fullmatch(name) for name in names):
        names = tuple(f"mesh_dim_{k}" for k in range(device_mesh.ndim))
    return Mesh(list(zip(names, device_mesh.mesh.shape, strict=True)))


def _layout(mesh: Mesh, placements: Sequence[Placement], rank: int, order: dict[int, tuple[int, ...]] | None) -> Layout:
    dims: list[list[int]] = [[] for _ in range(rank)]
    partial = []
    for axis, placement in enumerate(placements):
        if type(placement) is Shard:
            dims[placement.dim].append(axis)
        elif isinstance(placement, Partial):
            partial.append(mesh.names[axis])
        elif not isinstance(placement, Replicate):
            raise MoveError(f"mesh dim {axis}: scrimp cannot read {placement}; it supports Shard, Replicate and Partial")
    ordered = [order.get(dim, tuple(axes)) if order else tuple(axes) for dim, axes in enumerate(dims)]
    return Layout(dims=tuple(tuple(mesh.names[axis] for axis in axes) for axes in ordered), partial=tuple(partial))


def _nested_box(layout: Layout, shape: Sequence[int], mesh: Mesh, rank: int) -> Box:
    """DTensor's box on a rank: each axis in turn splits the box that the axes before it left."""

    def spans() -> Iterator[tuple[int, int]]:
        for size, axes in zip(shape, layout.dims, strict=True):
            start, stop = 0, size
            for axis in axes:
                chunk = -(-(stop - start) // mesh.axis_size(axis))
                first = min(start + chunk * mesh.coordinate(rank, axis), stop)
                start, stop = first, min(first + chunk, stop)
            yield start, stop

    return tuple(spans())
