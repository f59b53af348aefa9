"""The redistribution plans of PyTorch's DTensor: reads its two planners without a cluster and without a GPU.

A plan is read from the planner itself, under a fake process group, with its costs for 8 GPUs a host. Then it is replayed on
layouts, and costed by one model for all peers. Elements received by the busiest device, for n devices on the axis and L elements
on each before the step:

    all_gather (n-1) L    all_to_all, reduce_scatter (n-1)/n L    all_reduce 2 (n-1)/n L    slice, partial 0

The peak is the largest local array before, between and after the steps; staging inside a step does not count. This is the only
file with torch's private names for it.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple
from unittest.mock import patch

from scrimp.errors import ScrimpError
from scrimp.layout import Layout, Mesh

GPUS_PER_HOST = 8

_NAMES = {  # torch's private names, and their modules
    "torch.distributed.device_mesh": ("init_device_mesh",),
    "torch.distributed.tensor": ("Partial", "Replicate", "Shard"),
    "torch.distributed.tensor._collective_utils": ("MeshTopoInfo",),
    "torch.distributed.tensor._dtensor_spec": ("DTensorSpec", "ShardOrderEntry", "TensorMeta"),
    "torch.distributed.tensor._redistribute": (
        "_gen_transform_infos_non_cached",
        "clear_redistribute_planner_cache",
        "use_min_cost_redistribution_plan",
    ),
    "torch.testing._internal.distributed.fake_pg": ("FakeStore",),
}


@dataclass(frozen=True, kw_only=True)
class PeerPlan:
    """A peer's plan, such as `("all_gather y dim 0", "all_to_all x dim 0 -> 1", "slice y dim 0")`."""

    steps: tuple[str, ...]
    received_numel: int
    peak_numel: int


class _Step(NamedTuple):
    """One mesh axis changes its role: the dim it splits, None for replicas, "+" for a partial sum."""

    axis: str
    src: int | str | None
    dst: int | str | None


def dtensor_plan(
    shape: Sequence[int],
    mesh: Mesh,
    src: Layout | str,
    dst: Layout | str,
    *,
    min_cost: bool,
    path: Literal["nccl", "gloo"] = "nccl",
) -> PeerPlan:
    """The plan of DTensor's default planner, or of its optional min-cost one, for a float32 array.

    An axis order other than the mesh's within a dim makes torch use the min-cost planner either way. On the gloo
    path every all-to-all is an all-gather and a slice, as torch runs it on CPU meshes. Hold `fake_world` open over
    many calls: it is set up and torn down for each call otherwise.
    """
    src, dst = _whole_axes(src, mesh, shape), _whole_axes(dst, mesh, shape)
    if src == dst:
        return _replay(shape, mesh, src, dst, [])
    steps = _planned_steps(shape, mesh, src, dst, min_cost=min_cost)
    if path == "gloo":
        steps = [part for step in steps for part in _without_all_to_all(step)]
    return _replay(shape, mesh, src, dst, steps)


def naive_plan(shape: Sequence[int], mesh: Mesh, src: Layout | str, dst: Layout | str) -> PeerPlan:
    """Reduces partial sums, gathers everything, then slices."""
    src, dst = _whole_axes(src, mesh, shape), _whole_axes(dst, mesh, shape)
    if src == dst:
        return _replay(shape, mesh, src, dst, [])
    steps = [_Step(axis, "+", None) for axis in src.partial]
    steps += [_Step(axis, dim, None) for dim, axes in enumerate(src.dims) for axis in reversed(axes)]
    steps += [_Step(axis, None, dim) for dim, axes in enumerate(dst.dims) for axis in axes]
    steps += [_Step(axis, None, "+") for axis in dst.partial]
    return _replay(shape, mesh, src, dst, steps)


@contextmanager
def fake_world(size: int) -> Iterator[None]:
    """A process group of `size` ranks that exchange nothing, for meshes of up to `size` devices."""
    private = _private()
    dist = importlib.import_module("torch.distributed")
    if dist.is_initialized():
        raise ScrimpError(
            f"a process group of {dist.get_world_size()} ranks ({dist.get_backend()}) is initialised; DTensor's plans are "
            "read under a fake one: call this in another process, or after destroy_process_group()"
        )
    _forget()
    dist.init_process_group("fake", store=private.FakeStore(), rank=0, world_size=size)
    try:
        yield
    finally:
        _forget()
        dist.destroy_process_group()


def _planned_steps(shape: Sequence[int], mesh: Mesh, src: Layout, dst: Layout, *, min_cost: bool) -> list[_Step]:
    private = _private()
    torch = importlib.import_module("torch")
    dist = torch.distributed
    open_already = dist.is_initialized() and dist.get_backend() == "fake"
    if open_already and dist.get_world_size() < mesh.size:
        raise ScrimpError(f"the fake world has {dist.get_world_size()} ranks, but the mesh {mesh} has {mesh.size} devices")
    with nullcontext() if open_already else fake_world(mesh.size):
        strides = torch.empty(tuple(shape), device="meta").stride()
        meta = private.TensorMeta(torch.Size(shape), strides, torch.float32)
        specs = [_spec(private, _device_mesh(mesh), meta, layout, mesh) for layout in (src, dst)]
        # A planner caches the partial sums of earlier calls, so each call gets a new one.
        private.clear_redistribute_planner_cache()
        # The planner infers the host's size from the number of GPUs it sees.
        with (
            patch.object(torch.cuda, "device_count", lambda: GPUS_PER_HOST),
            private.use_min_cost_redistribution_plan(enabled=min_cost),
        ):
            infos = private._gen_transform_infos_non_cached(*specs)
    return [_Step(mesh.names[info.mesh_dim], *(_role(private, place) for place in info.src_dst_placements)) for info in infos]


def _spec(private: SimpleNamespace, device_mesh: Any, meta: Any, layout: Layout, mesh: Mesh) -> Any:
    dim_of = {axis: dim for dim, axes in enumerate(layout.dims) for axis in axes}
    places = [
        private.Shard(dim_of[axis]) if axis in dim_of else private.Partial() if axis in layout.partial else private.Replicate()
        for axis in mesh.names
    ]
    order = tuple(
        private.ShardOrderEntry(tensor_dim=dim, mesh_dims=tuple(mesh.names.index(axis) for axis in axes))
        for dim, axes in enumerate(layout.dims)
        if axes
    )
    return private.DTensorSpec(device_mesh, tuple(places), tensor_meta=meta, shard_order=order)


def _role(private: SimpleNamespace, place: Any) -> int | str | None:
    if isinstance(place, private.Shard):
        return int(place.dim)
    return "+" if isinstance(place, private.Partial) else None


def _without_all_to_all(step: _Step) -> tuple[_Step, ...]:
    if isinstance(step.src, int) and isinstance(step.dst, int):
        return _Step(step.axis, step.src, None), _Step(step.axis, None, step.dst)
    return (step,)


def _replay(shape: Sequence[int], mesh: Mesh, src: Layout, dst: Layout, steps: Sequence[_Step]) -> PeerPlan:
    """Replays the steps from `src`, and checks that they end at `dst`."""
    texts, received = [], 0
    now, local = src, src.local_numel(shape, mesh)
    peak = local
    for step in steps:
        n, before = mesh.axis_size(step.axis), local
        now = _apply(now, step)
        local = now.local_numel(shape, mesh)
        peak = max(peak, local)
        match step.src, step.dst:
            case int(), None:
                text, moved = f"all_gather {step.axis} dim {step.src}", (n - 1) * before
            case int(), int():
                text, moved = f"all_to_all {step.axis} dim {step.src} -> {step.dst}", -(-(n - 1) * before // n)
            case "+", None:
                text, moved = f"all_reduce {step.axis}", -(-2 * (n - 1) * before // n)
            case "+", int():
                text, moved = f"reduce_scatter {step.axis} dim {step.dst}", -(-(n - 1) * before // n)
            case None, int():
                text, moved = f"slice {step.axis} dim {step.dst}", 0
            case None, "+":
                text, moved = f"partial {step.axis}", 0
            case _:
                raise ScrimpError(
                    f"{src} -> {dst} on {mesh}: DTensor plans to turn the split over '{step.axis}' into a partial sum at once, "
                    "which torch cannot run; its min-cost planner goes through replicas"
                )
        if n > 1:  # torch skips an axis of one device
            texts.append(text)
            received += moved
    if now != dst:
        raise ScrimpError(f"{src} -> {dst} on {mesh}: the steps {texts} end at {now}")
    return PeerPlan(steps=tuple(texts), received_numel=received, peak_numel=peak)


def _apply(layout: Layout, step: _Step) -> Layout:
    dims = [tuple(axis for axis in axes if axis != step.axis) for axes in layout.dims]
    partial = [axis for axis in layout.partial if axis != step.axis]
    if isinstance(step.dst, int):
        dims[step.dst] += (step.axis,)
    elif step.dst == "+":
        partial.append(step.axis)
    return Layout(dims=tuple(dims), partial=tuple(partial), factors=layout.factors)


def _whole_axes(layout: Layout | str, mesh: Mesh, shape: Sequence[int]) -> Layout:
    layout = Layout.parse(layout)
    layout.validate(mesh, shape)
    for axis in (*(axis for axes in layout.dims for axis in axes), *layout.partial):
        if axis not in mesh.names:
            raise ScrimpError(f"layout {layout}: DTensor splits over whole mesh axes; '{axis}' is a part of one")
    return layout


@cache
def _device_mesh(mesh: Mesh) -> Any:
    sizes = tuple(size for _, size in mesh.axes)
    return _private().init_device_mesh("cuda", sizes, mesh_dim_names=mesh.names)


def _forget() -> None:
    """Clears caches that hold a device mesh of a world that ends, or costs of an earlier one."""
    _device_mesh.cache_clear()
    _private().clear_redistribute_planner_cache()
    _private().MeshTopoInfo.build_from_mesh.cache_clear()


@cache
def _private() -> SimpleNamespace:
    try:
        version = importlib.import_module("torch").__version__
    except ImportError:
        raise ScrimpError("DTensor's plans are read from torch, which is not installed") from None
    found = SimpleNamespace()
    for module, names in _NAMES.items():
        for name in names:
            try:
                setattr(found, name, getattr(importlib.import_module(module), name))
            except (ImportError, AttributeError):
                raise ScrimpError(f"torch {version} has no {module}.{name}, from which DTensor's plans are read") from None
    return found
