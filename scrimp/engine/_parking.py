"""A layer's inputs between its forward and its recomputation: on the device, or parked on the host."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from scrimp.chunks._arena import arena
from scrimp.chunks._cuda_meter import CudaMeter
from scrimp.chunks._lanes import Event
from scrimp.chunks._meter import CpuMeter
from scrimp.chunks._store import Store
from scrimp.engine._again import StepAgain
from scrimp.engine._buffers import Copy
from scrimp.errors import FitError
from scrimp.ledger import format_nbytes


class Parked:
    """Only activations are parked: tensors that gradients flow through. Masks and tables are shared by many layers, so
    that parking one layer's reference would free nothing."""

    def __init__(self, args: Any, kwargs: Any, store: Store, meter: CpuMeter | CudaMeter) -> None:
        self._leaves, self._spec = tree_flatten((args, kwargs))
        self._store = store
        self._meter = meter
        self._away: dict[int, tuple[torch.Tensor, torch.Size, Event]] = {}
        self.used = False
        self.saw: list[Copy] = []  # the buffers that the first forward saw
        self._versions = [_version(leaf) for leaf in self._leaves]

    def check_unchanged(self, layer: int, by: str) -> None:
        """A recomputation would start from other inputs if one of them was written into."""
        if [_version(leaf) for leaf in self._leaves] != self._versions:
            path = self._store.table.layers[layer].path
            raise StepAgain(f"an input of layer '{path}' was changed in place by {by}", unfit=layer)

    def bring(self) -> tuple[Any, Any]:
        """Arguments and keywords, on the device."""
        self.used = True
        for k, (there, shape, parked) in self._away.items():
            here = torch.empty(shape, dtype=there.dtype, device=self._store.device)
            self._store.lanes.wait(parked)  # the way up waits for what is computed, and so for the way down
            self._store.lanes.wait(self._store.lanes.up(here, there.view(shape)))
            self._store.traffic.up_nbytes += there.nbytes
            self._leaves[k] = here.requires_grad_()
        self._away.clear()
        args, kwargs = tree_unflatten(self._leaves, self._spec)
        return args, kwargs

    def park(self) -> None:
        for k, leaf in enumerate(self._leaves):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad and leaf.is_floating_point():
                there = self._host(leaf)
                source = leaf.detach()
                parked = self._store.lanes.down(there.view(leaf.shape), source)
                if source.is_cuda:
                    source.record_stream(self._store.lanes.downward)
                self._store.traffic.down_nbytes += there.nbytes
                self._away[k] = (there, leaf.shape, parked)
                self._leaves[k], self._versions[k] = None, None

    def _host(self, leaf: torch.Tensor) -> torch.Tensor:
        host, room = self._store.books.host, self._store.host_room_nbytes
        # What layers on disk pass through may be let go now, but will be wanted again.
        need = host.total_nbytes - host.now["temporaries"] + self._store.spill.need_nbytes + leaf.nbytes
        if room is not None and need > room:
            raise FitError(
                f"inputs of recomputed layers do not fit on the device, and parked on the host they need "
                f"{format_nbytes(need)} of {format_nbytes(room)} ({host.snapshot()}). "
                "Use a smaller batch, more accumulate, or a larger Memory(host=...)"
            )
        if self._store.lanes.overlapped:
            there = torch.empty(leaf.numel(), dtype=leaf.dtype, pin_memory=True)
        else:
            there = arena(leaf.numel(), leaf.dtype)
            self._meter.ignore(there)
        nbytes = there.nbytes
        host.charge("activations", nbytes)
        weakref.finalize(there.untyped_storage(), host.free, "activations", nbytes)
        return there


def _version(leaf: Any) -> int | None:
    return leaf._version if isinstance(leaf, torch.Tensor) and not leaf.is_inference() else None
