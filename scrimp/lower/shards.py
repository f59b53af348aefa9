"""The model's data on one rank: weights at rest, gradients in the shards of the optimizer states, buffers whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod

import torch

from scrimp.layout import Mesh
from scrimp.lower.moves import Communicator, local_shape, made_whole, redistribute
from scrimp.lower.rest import Rest
from scrimp.move import synthesize
from scrimp.planner import Placed


def cut(whole: torch.Tensor, place: Placed, mesh: Mesh, rank: int) -> torch.Tensor:
    """A rank's part of a whole tensor, as a view where that is possible."""
    factors = [factor for dim in place.dims for factor in dim]
    found = whole.reshape([size for size, _ in factors])
    for dim, (size, axes) in enumerate(factors):
        count = prod(mesh.axis_size(axis) for axis in axes)
        index = 0
        for axis in axes:
            index = index * mesh.axis_size(axis) + mesh.coordinate(rank, axis)
        found = found.narrow(dim, index * (size // count), size // count)
    return found.reshape(local_shape(place, mesh))


def flat_tile(whole: torch.Tensor, each: Rest, mesh: Mesh, rank: int) -> torch.Tensor:
    """A rank's tile of a whole parameter, flat and padded."""
    return padded(cut(whole, each.use, mesh, rank), each, mesh)


def padded(tile: torch.Tensor, each: Rest, mesh: Mesh) -> torch.Tensor:
    more = each.flat_shape(mesh)[1] - tile.numel()
    flat = tile.reshape(1, -1)
    return torch.nn.functional.pad(flat, (0, more)) if more else flat


def gathered(comm: Communicator, share: torch.Tensor, each: Rest, over: tuple[str, ...]) -> torch.Tensor:
    """A tile as operators use it, from its shares over some axes: the share itself, as a view, where there are none."""
    mesh, shape = comm.mesh, local_shape(each.use, comm.mesh)
    flat = share.view(1, -1)
    if over:
        program = synthesize(
            each.flat_shape(mesh), mesh, each.layout(over), each.layout(()), dtype=str(share.dtype).removeprefix("torch.")
        )
        flat = comm.move(program, flat, donate=False)
    return flat[:, : each.tile_numel(mesh)].view(shape)


def summed(
    comm: Communicator,
    gradient: torch.Tensor,
    place: Placed,
    each: Rest,
    over: tuple[str, ...],
    *,
    later: tuple[str, ...] = (),
    donate: bool,
) -> torch.Tensor:
    """A gradient, flat: its share over some axes, summed over the ranks, but not yet along the axes `later`."""
    if place.dims != each.use.dims:
        after = replace(each.use, partial=later)
        gradient, donate, place = redistribute(comm, gradient, place, after, donate=donate), True, after
    flat = padded(gradient, each, comm.mesh)
    del gradient
    return shared(comm, flat, each, ((), place.partial), (over, later), donate=donate)


def shared(
    comm: Communicator,
    flat: torch.Tensor,
    each: Rest,
    before: tuple[tuple[str, ...], tuple[str, ...]],
    after: tuple[tuple[str, ...], tuple[str, ...]],
    *,
    donate: bool,
) -> torch.Tensor:
    """Flat shares of a tile from (axes, axes along which they are summands) to others."""
    if before == after:
        return flat
    dtype = str(flat.dtype).removeprefix("torch.")
    program = synthesize(each.flat_shape(comm.mesh), comm.mesh, each.layout(*before), each.layout(*after), dtype=dtype)
    return comm.move(program, flat.view(1, -1), donate=donate)


class Shards:
    """Weights at rest, and gradients: each rank holds its share of each tile, flat."""

    def __init__(
        self,
        rest: Mapping[str, Rest],
        comm: Communicator,
        whole: Mapping[str, torch.Tensor],
        later: Mapping[str, tuple[str, ...]] | None = None,
        *,
        device: torch.device | str = "cpu",
    ) -> None:
        """`whole`: the model's parameters and buffers, by name, on any device. `later`: axes along which a gradient is summed
        when it is read. `device`: where operators run."""
        self.rest, self.comm, self.device, self._later = rest, comm, torch.device(device), dict(later or {})
        self.weights = {name: self._share(each, whole[name]) for name, each in rest.items()}
        self.gradients: dict[str, torch.Tensor] = {}
        self.buffers = {name: tensor.to(self.device, copy=True) for name, tensor in whole.items() if name not in rest}

    def _share(self, each: Rest, whole: torch.Tensor) -> torch.Tensor:
        mesh, rank = self.comm.mesh, self.comm.rank
        start, stop = each.span(each.weight, mesh, rank)
        return flat_tile(whole, each, mesh, rank)[:, start:stop].to(self.device, copy=True)

    def enter(self, layer: int, *, backward: bool) -> None:
        """All weights are here already."""

    def leave(self, layer: int, *, backward: bool) -> None:
        """And stay."""

    def gather(self, name: str) -> torch.Tensor:
        return gathered(self.comm, self.weights[name], self.rest[name], self.rest[name].weight)

    def accumulate(self, name: str, gradient: torch.Tensor, place: Placed, *, donate: bool) -> None:
        """Sums a gradient into its shard, sharded as the plan says."""
        each, later, held = self.rest[name], self._later.get(name, ()), gradient.untyped_storage().data_ptr()
        flat = summed(self.comm, gradient, place, each, each.gradient if later else each.states, later=later, donate=donate)
        del gradient
        known = self.gradients.get(name)
        if known is not None:
            known.add_(flat)
        else:  # later micro-batches are added in place: another value, or another weight's gradient, must not share the bytes
            alias = not donate and flat.untyped_storage().data_ptr() == held
            self.gradients[name] = flat.clone() if alias else flat

    def buffer(self, name: str) -> torch.Tensor:
        return self.buffers[name]

    def store(self, name: str, new: torch.Tensor) -> None:
        self.buffers[name].copy_(new)

    def offload(self, tensor: torch.Tensor) -> torch.Tensor:
        """To the host; on the CPU that is a copy. From a GPU into pinned memory, so that the host does not wait."""
        host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
        return host.copy_(tensor, non_blocking=True)

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.device, non_blocking=True, copy=True)

    def gradient_tile(self, name: str) -> torch.Tensor:
        """An accumulated gradient in the placement of its weight in use."""
        each, later, flat = self.rest[name], self._later.get(name, ()), self.gradients[name]
        if later:
            flat = shared(self.comm, flat, each, (each.gradient, later), (each.states, ()), donate=False)
        return gathered(self.comm, flat, each, each.states)

    def set_gradient(self, name: str, tile: torch.Tensor) -> None:
        """Replaces an accumulated gradient by one that is summed. `tile`: as `gradient_tile` gives it."""
        each = self.rest[name]
        self._later.pop(name, None)
        self.gradients[name] = summed(self.comm, tile, each.use, each, each.states, donate=True)

    def whole_gradient(self, name: str) -> torch.Tensor:
        """A gradient as one process would have it."""
        return made_whole(self.comm, self.gradient_tile(name), self.rest[name].use)
