"""What ranks do in the tests of the DTensor door."""

from __future__ import annotations

import itertools
import warnings

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh

import scrimp
from scrimp.errors import MoveError

PLACES = (Replicate(), Shard(0), Shard(1))


def numbers(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(1, 1 + torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


def every_pair(shape: tuple[int, int]) -> list[str]:
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("x", "y"))
    full, bad = numbers(shape), []
    for src in itertools.product(PLACES, repeat=2):
        tensor = distribute_tensor(full, mesh, src)
        for dst in itertools.product(PLACES, repeat=2):
            want = distribute_tensor(full, mesh, dst)
            got = scrimp.redistribute(tensor, dst)
            same = got.placements == want.placements and got.shape == want.shape and got.stride() == want.stride()
            if not same or not torch.equal(got.to_local(), want.to_local()):
                bad.append(f"{shape} {src} -> {dst}: {got} is not {want}")
    return bad


def flattened() -> tuple[bool, bool]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("x", "y"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mesh["x", "y"]._flatten("xy")
    full = numbers((5, 3))
    tensor = distribute_tensor(full, mesh, [Shard(0), Shard(0)])
    ours = scrimp.redistribute(tensor, [Replicate(), Replicate()]).to_local()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = tensor.redistribute(placements=[Replicate(), Replicate()]).to_local()
    return torch.equal(ours, full), torch.equal(theirs, full)


def partial(op: str) -> list[str]:
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("x", "y"))
    value = {"sum": 5.0, "avg": 2.5, "max": 3.0, "min": 2.0, "product": 6.0}[op]  # of 2 and 3
    bad = []
    for shape in [(8, 16), (7, 5)]:
        local = torch.full(shape, 2.0 + dist.get_rank() // 4)
        tensor = DTensor.from_local(local, mesh, [Partial(op), Replicate()], run_check=False)
        for dst in itertools.product(PLACES, repeat=2):
            got = scrimp.redistribute(tensor, dst).to_local()
            if not torch.equal(got, distribute_tensor(torch.full(shape, value), mesh, dst).to_local()):
                bad.append(f"{op} {shape} -> {dst}: {got}")
        kept = scrimp.redistribute(tensor, [Partial(op), Shard(0)])
        if kept.placements != (Partial(op), Shard(0)) or not (kept.to_local() == local[0, 0]).all():
            bad.append(f"{op} {shape}: a kept partial changed to {kept}")
    return bad


def gradients() -> list[str]:
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("x", "y"))
    bad = []
    for shape in [(8, 16), (7, 5)]:
        weight = numbers(shape)
        for src, dst in itertools.product(itertools.product(PLACES, repeat=2), repeat=2):
            tensor = distribute_tensor(numbers(shape), mesh, src).requires_grad_()
            out = scrimp.redistribute(tensor, dst)
            (out * distribute_tensor(weight, mesh, dst)).sum().backward()
            want = distribute_tensor(weight, mesh, src)
            assert tensor.grad is not None
            if tensor.grad.placements != want.placements or not torch.equal(tensor.grad.to_local(), want.to_local()):
                bad.append(f"{shape} {src} -> {dst}: {tensor.grad}")
    local = torch.ones(8, 16, requires_grad=True)
    summed = DTensor.from_local(local, mesh, [Partial(), Replicate()], run_check=False)
    scrimp.redistribute(summed, [Shard(0), Replicate()]).sum().backward()
    if local.grad is None or not torch.equal(local.grad, torch.ones(8, 16)):
        bad.append(f"partial: {local.grad}")
    return bad


def three_dims() -> list[str]:
    mesh = init_device_mesh("cpu", (2, 2, 2))  # without names
    full, bad = numbers((4, 8, 6)), []
    places = [Replicate(), Shard(0), Shard(-1)]
    pairs = list(itertools.product(itertools.product(places, repeat=3), repeat=2))
    for src, dst in pairs[::7]:
        tensor = distribute_tensor(full, mesh, src)
        got, want = scrimp.redistribute(tensor, dst), distribute_tensor(full, mesh, dst)
        if got.placements != want.placements or not torch.equal(got.to_local(), want.to_local()):
            bad.append(f"{src} -> {dst}")
    return bad


def refused(kind: str) -> str:
    from torch.distributed.tensor.placement_types import _StridedShard

    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("x", "y"))
    tensor = distribute_tensor(numbers((8, 16)), mesh, [Replicate(), Replicate()])
    try:
        if kind == "count":
            scrimp.redistribute(tensor, [Shard(0)])
        elif kind == "dim":
            scrimp.redistribute(tensor, [Shard(5), Replicate()])
        elif kind == "partial":
            scrimp.redistribute(tensor, [Partial(), Replicate()])
        elif kind == "plain":
            scrimp.redistribute(tensor.to_local(), [Shard(0), Replicate()])
        elif kind == "strided":
            scrimp.redistribute(tensor, [_StridedShard(0, split_factor=2), Replicate()])
    except MoveError as error:
        return str(error)
    return "no error"
