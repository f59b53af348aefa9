"""`engine.dtensors`: the parameters of a plan as DTensors, for tools of one's own.

DTensor splits a dim over mesh axes by whole tiles, the axes in the order of the mesh. A plan may also split an inner factor of a
dim ([(-)(x),-], as of a weight that holds query, key and value), or take the axes in another order. DTensor has no public
placement for that, so such a dim is gathered: it is replicated in the DTensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from scrimp.engine.lowered.tiling import PlannedTiling
from scrimp.errors import RunError
from scrimp.layout import Mesh
from scrimp.lower import redistribute
from scrimp.planner import Placed, placed

if TYPE_CHECKING:
    from scrimp.chunks import Slot
    from scrimp.engine._training import Training

DTensors = dict[str, DTensor]


def dtensors(engine: Training) -> DTensors:
    """By every name that a parameter has; tied names share one DTensor."""
    passes, tiling = engine.under_plan, engine.store.tiling
    engine.check_usable(reading=True)
    assert isinstance(tiling, PlannedTiling)
    if len(tiling.program.parts) > 1:
        raise RunError(
            f"engine.dtensors(): the plan has {len(tiling.program.parts)} pipeline stages, and a parameter is on the mesh of one "
            "stage only; use engine.state_dict(), or plan without stages"
        )
    if not dist.is_initialized():
        raise RunError(
            "engine.dtensors(): a DeviceMesh needs a process group, and there is none: call torch.distributed."
            "init_process_group('gloo', store=torch.distributed.HashStore(), rank=0, world_size=1) first"
        )
    if passes.device_mesh is None:  # once, because it makes process groups
        mesh = tiling.comm.mesh
        sizes = tuple(size for _, size in mesh.axes)
        passes.device_mesh = init_device_mesh(engine.wire.device.type, sizes, mesh_dim_names=mesh.names)
    made: DTensors = {}
    found: DTensors = {}
    for name, parameter in engine.weights.items():
        layer, slot = engine.places[id(parameter)]
        if slot.name not in made:
            made[slot.name] = _dtensor(engine, tiling, layer, slot, passes.device_mesh)
        found[name] = made[slot.name]
    return found


def _dtensor(engine: Training, tiling: PlannedTiling, layer: int, slot: Slot, device_mesh: DeviceMesh) -> DTensor:
    each, comm = tiling.program.rest(slot.name), tiling.comm
    with engine.store.opened(layer) as data:
        (piece,) = data.pieces(slot)
        mine = (piece.master if slot.trainable else piece.weight).to(engine.wire.device, torch.float32, copy=True)
    tile, after = tiling.tile(slot.name, mine), expressible(each.use, comm.mesh)
    if after != each.use:
        tile = redistribute(comm, tile, each.use, after, donate=True)
    stride = torch.empty(each.shape, device="meta").stride()
    return DTensor.from_local(
        tile, device_mesh, placements(after, comm.mesh), run_check=False, shape=torch.Size(each.shape), stride=stride
    )


def expressible(place: Placed, mesh: Mesh) -> Placed:
    """The placement itself, or with every dim whole that DTensor would split otherwise."""
    dims = zip(place.dims, _axes(place, mesh), strict=True)
    return placed([dim if axes is not None else [(size, ()) for size, _ in dim] for dim, axes in dims])


def placements(place: Placed, mesh: Mesh) -> tuple[Placement, ...]:
    """One for each axis of the mesh. `place`: an expressible one."""
    of = {axis: dim for dim, axes in enumerate(_axes(place, mesh)) for axis in axes or ()}
    return tuple(Shard(of[axis]) if axis in of else Replicate() for axis in mesh.names)


def _axes(place: Placed, mesh: Mesh) -> Iterator[tuple[str, ...] | None]:
    yield from (_splits(dim, mesh) for dim in place.dims)


def _splits(dim: Sequence[tuple[int, tuple[str, ...]]], mesh: Mesh) -> tuple[str, ...] | None:
    """The axes that split a dim as DTensor does; None if they split it another way. An axis of one rank splits nothing."""
    axes: list[str] = []
    tile = 1  # of the factors so far: if it is more than one element, an inner split is not a contiguous part of the dim
    for size, names in dim:
        real = [axis for axis in names if mesh.axis_size(axis) > 1]
        if real and tile > 1:
            return None
        axes += real
        tile *= size // prod(map(mesh.axis_size, real))
    return tuple(axes) if axes == sorted(axes, key=mesh.names.index) else None
