"""The model's data on one rank: weights at rest, gradients in the shards of the optimizer states, buffers whole."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import torch

from scrimp.layout import Mesh
from scrimp.lower.comm import Communicator
from scrimp.lower.moves import local_shape, made_whole, redistribute
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


class Shards:
    """Weights at rest, and gradients: each rank holds its share of each tile, flat."""

    def __init__(self, rest: Mapping[str, Rest], comm: Communicator, whole: Mapping[str, torch.Tensor]) -> None:
        """`whole`: the model's parameters and buffers, by name."""
        self.rest, self.comm = rest, comm
        self.weights = {name: self._share(each, whole[name]) for name, each in rest.items()}
        self.gradients: dict[str, torch.Tensor] = {}
        self.buffers = {name: tensor.clone() for name, tensor in whole.items() if name not in rest}

    def _share(self, each: Rest, whole: torch.Tensor) -> torch.Tensor:
        mesh, rank = self.comm.mesh, self.comm.rank
        tile = cut(whole, each.use, mesh, rank).reshape(1, -1)
        start, stop = each.layout(each.weight).tile(each.flat_shape(mesh), mesh, rank)[1]
        return tile[:, start:stop].clone()

    def gather(self, name: str) -> torch.Tensor:
        """A weight as operators use it: its shard itself where it is not sharded beyond that."""
        each, mesh = self.rest[name], self.comm.mesh
        shape = local_shape(each.use, mesh)
        if not each.weight:
            return self.weights[name].view(shape)
        program = synthesize(
            each.flat_shape(mesh), mesh, each.layout(each.weight), each.layout(()), dtype=each.dtype
        )  # fmt: skip
        return self.comm.move(program, self.weights[name], donate=False).view(shape)

    def accumulate(self, name: str, gradient: torch.Tensor, place: Placed, *, donate: bool) -> None:
        """Sums a gradient into its shard. It is accumulated sharded as the optimizer states are."""
        each, mesh = self.rest[name], self.comm.mesh
        if place.dims != each.use.dims:
            gradient, place = redistribute(self.comm, gradient, place, each.use, donate=donate), each.use
            donate = True
        flat, held = gradient.reshape(1, -1), gradient.untyped_storage().data_ptr()
        del gradient
        if place.partial or each.states:
            program = synthesize(
                each.flat_shape(mesh), mesh, each.layout((), place.partial), each.layout(each.states), dtype=each.dtype
            )  # fmt: skip
            flat = self.comm.move(program, flat, donate=donate)
        known = self.gradients.get(name)
        if known is not None:
            known.add_(flat)
        else:  # later micro-batches are added in place: another value, or another weight's gradient, must not share the bytes
            shared = not donate and flat.untyped_storage().data_ptr() == held
            self.gradients[name] = flat.clone() if shared else flat

    def buffer(self, name: str) -> torch.Tensor:
        return self.buffers[name]

    def store(self, name: str, new: torch.Tensor) -> None:
        self.buffers[name].copy_(new)

    def offload(self, tensor: torch.Tensor) -> torch.Tensor:
        """To the host; on the CPU that is a copy."""
        return tensor.to("cpu", copy=True)

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    def gradient_tile(self, name: str) -> torch.Tensor:
        """An accumulated gradient in the placement of its weight in use."""
        each, mesh = self.rest[name], self.comm.mesh
        program = synthesize(
            each.flat_shape(mesh), mesh, each.layout(each.states), each.layout(()), dtype=each.dtype
        )  # fmt: skip
        return self.comm.move(program, self.gradients[name], donate=False).view(local_shape(each.use, mesh))

    def set_gradient(self, name: str, tile: torch.Tensor) -> None:
        """Replaces an accumulated gradient. `tile`: as `gradient_tile` gives it."""
        del self.gradients[name]
        self.accumulate(name, tile, self.rest[name].use, donate=True)

    def whole_gradient(self, name: str) -> torch.Tensor:
        """A gradient as one process would have it."""
        return made_whole(self.comm, self.gradient_tile(name), self.rest[name].use)
