"""The model's data on one rank: weights at rest, gradients in the shards of the optimizer states, buffers whole."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from scrimp.lower.moves import Communicator, made_whole
from scrimp.lower.weights.buckets import Buckets
from scrimp.lower.weights.overlap import Overlap
from scrimp.lower.weights.rest import Rest
from scrimp.lower.weights.tiles import flat_tile, gathered, shared, summed
from scrimp.lower.weights.together import Summed, Together
from scrimp.planner import Placed


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
        buckets: Buckets | None = None,
        overlap: Overlap | None = None,
    ) -> None:
        """`whole`: the model's parameters and buffers, by name, on any device. `later`: axes along which a gradient is summed
        when it is read. `device`: where operators run. `buckets`: moves that run together. `overlap`: those that run beside
        operators."""
        self.rest, self.comm, self.device, self._later = rest, comm, torch.device(device), dict(later or {})
        self.weights = {name: self._share(each, whole[name]) for name, each in rest.items()}
        self.gradients: dict[str, torch.Tensor] = {}
        self._together = Together(buckets or Buckets(), overlap or Overlap(), rest, comm, self._later, self.weights.__getitem__)
        self.buffers = {name: tensor.to(self.device, copy=True) for name, tensor in whole.items() if name not in rest}

    def _share(self, each: Rest, whole: torch.Tensor) -> torch.Tensor:
        mesh, rank = self.comm.mesh, self.comm.rank
        start, stop = each.span(each.weight, mesh, rank)
        return flat_tile(whole, each, mesh, rank)[:, start:stop].to(self.device, copy=True)

    def enter(self, layer: int, *, backward: bool) -> None:
        """All weights are here already."""
        self._together.enter(layer, backward=backward)

    def leave(self, layer: int, *, backward: bool) -> None:
        """And stay."""
        self._add(self._together.leave())

    def gather(self, name: str) -> torch.Tensor:
        return self._together.gather(name)

    def accumulate(self, name: str, gradient: torch.Tensor, place: Placed, *, donate: bool) -> None:
        """Sums a gradient into its shard, sharded as the plan says."""
        held = gradient.untyped_storage().data_ptr()
        found = self._together.sum(name, gradient, place, donate=donate)
        del gradient
        self._add(found, 0 if donate else held)

    def _add(self, found: list[Summed], held: int = 0) -> None:
        """`held`: the address of a gradient that others use."""
        for _, each, flat in found:
            known = self.gradients.get(each)
            if known is not None:
                known.add_(flat)
            else:  # later micro-batches are added in place: another value, or another weight's gradient, must not share the bytes
                alias = bool(held) and flat.untyped_storage().data_ptr() == held
                self.gradients[each] = flat.clone() if alias else flat

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
