"""Inputs of a recomputed layer between its forward and its recomputation: kept on the device, or offloaded to the host."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from scrimp.chunks import Event, Meter, Store, Unseen, arena
from scrimp.engine.step.abandon import StepAgain
from scrimp.engine.step.buffers import Copy
from scrimp.errors import FitError
from scrimp.ledger import format_nbytes


@dataclass(frozen=True, kw_only=True)
class _View:
    """One tensor among the inputs: the arguments that it fills, and its view of the memory stretch."""

    places: tuple[int, ...]
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True, kw_only=True)
class _Stretch:
    """Inputs that overlap in memory, offloaded together. `there` holds all `numel` elements in order, or, for a single view
    with gaps, only those of the view."""

    views: tuple[_View, ...]
    numel: int
    there: torch.Tensor
    done: Event

    def target(self, base: torch.Tensor) -> torch.Tensor:
        """The part of the device memory that is filled from `there`."""
        if self.there.numel() == self.numel:
            return base
        return base.as_strided(self.views[0].size, self.views[0].stride, self.views[0].offset)


class LayerInputs:
    """The inputs of one layer. Only activations are offloaded: tensors that gradients flow through. Masks and tables are shared
    by many layers, so offloading one layer's reference would free nothing.

    The restored inputs look to the layer like the original ones: a tensor that was passed several times is one tensor again,
    strides are the same, and tensors that overlapped in memory overlap again."""

    def __init__(self, args: Any, kwargs: Any, store: Store, meter: Meter) -> None:
        self._leaves, self._spec = tree_flatten((args, kwargs))
        self._store = store
        self._meter = meter
        self._away: list[_Stretch] = []
        self.used = False
        self.saw: list[Copy] = []  # the buffers that the first forward saw
        self._versions = [_version(leaf) for leaf in self._leaves]

    def check_unchanged(self, layer: int, by: str) -> None:
        """Raise if an input was written into, because a recomputation would then start from different inputs."""
        if [_version(leaf) for leaf in self._leaves] != self._versions:
            path = self._store.table.layers[layer].path
            raise StepAgain(f"an input of layer '{path}' was changed in place by {by}", unfit=layer)

    def bring(self) -> tuple[Any, Any]:
        """Positional and keyword arguments, on the device."""
        self.used = True
        copy_streams = self._store.copy_streams
        for stretch in self._away:
            base = torch.empty(stretch.numel, dtype=stretch.there.dtype, device=self._store.device)
            target = stretch.target(base)
            copy_streams.wait(stretch.done)  # the copy up is ordered after the compute stream, and so after the copy down
            copy_streams.wait(copy_streams.up(target, stretch.there.view(target.shape)))
            self._store.traffic.up_nbytes += stretch.there.nbytes
            for view in stretch.views:
                here = base.as_strided(view.size, view.stride, view.offset).detach().requires_grad_()
                for place in view.places:
                    self._leaves[place] = here
        self._away.clear()
        args, kwargs = tree_unflatten(self._leaves, self._spec)
        return args, kwargs

    def offload(self) -> None:
        places: dict[int, list[int]] = {}
        for k, leaf in enumerate(self._leaves):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad and leaf.is_floating_point() and leaf.numel():
                places.setdefault(id(leaf), []).append(k)
        for tensors in _overlapping([self._leaves[found[0]] for found in places.values()]):
            self._away.append(self._offload(tensors, places))
        for k in (k for found in places.values() for k in found):
            self._leaves[k], self._versions[k] = None, None

    def _offload(self, tensors: list[torch.Tensor], places: dict[int, list[int]]) -> _Stretch:
        first, numel = tensors[0], max(_span(tensor)[1] for tensor in tensors) - _span(tensors[0])[0]
        source = first.detach()
        if len(tensors) > 1 or first.numel() >= numel:  # no gaps, or another tensor fills them
            source = source.as_strided((numel,), (1,))
        there = on_host(self._store, self._meter, source, "inputs of recomputed layers")
        done = self._store.copy_streams.down(there.view(source.shape), source)
        if source.is_cuda:
            source.record_stream(self._store.copy_streams.downward)
        self._store.traffic.down_nbytes += there.nbytes
        views = tuple(
            _View(
                places=tuple(places[id(tensor)]),
                size=tensor.shape,
                stride=tensor.stride(),
                offset=int(tensor.storage_offset() - first.storage_offset()),
            )
            for tensor in tensors
        )
        return _Stretch(views=views, numel=numel, there=there, done=done)


def on_host(store: Store, meter: Meter, leaf: torch.Tensor, what: str) -> torch.Tensor:
    """A host buffer for the elements of a tensor, charged as long as it lives. `what` is offloaded, for the error if there is no
    room."""
    host, room = store.books.host, store.host_room_nbytes

    # Staging buffers of layers on disk may be free now, but will be needed again.
    def needed() -> int:
        return host.total_nbytes - host.now["temporaries"] + store.spill.need_nbytes + leaf.nbytes

    if room is not None and needed() > room and host.now["snapshot"]:
        store.free_host()
    need = needed()
    if room is not None and need > room:
        parts = {kind: nbytes for kind, nbytes in host.now.items() if kind != "temporaries"}
        parts |= {"staging for layers on disk": store.spill.need_nbytes, "the next one": leaf.nbytes}
        words = ", ".join(f"{kind} {format_nbytes(nbytes)}" for kind, nbytes in parts.items() if nbytes)
        raise FitError(
            f"{what} do not fit on the device, and offloaded to the host they need {format_nbytes(need)} or more of "
            f"{format_nbytes(room)} there ({words}). Use a smaller batch, more micro_batches, or a larger Memory(host=...)",
            tier="host",
        )
    if leaf.is_meta:  # a rehearsal has no memory on the host either
        with Unseen():
            there = torch.empty(leaf.numel(), dtype=leaf.dtype, device="meta")
        meter.ignore(there)
    elif store.copy_streams.overlapped:
        there = torch.empty(leaf.numel(), dtype=leaf.dtype, pin_memory=True)
    else:
        there = arena(leaf.numel(), leaf.dtype)
        meter.ignore(there)
    nbytes = there.nbytes
    host.charge("activations", nbytes)
    weakref.finalize(there.untyped_storage(), host.free, "activations", nbytes)
    return there


def _version(leaf: Any) -> int | None:
    return leaf._version if isinstance(leaf, torch.Tensor) and not leaf.is_inference() else None


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """The range of storage elements that a tensor spans."""
    start = int(tensor.storage_offset())
    return start, start + 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _overlapping(tensors: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Groups tensors whose ranges in one storage overlap, each group in order of its first element."""
    groups: list[list[torch.Tensor]] = []
    last, end = (0, torch.float32), 0
    for tensor in sorted(tensors, key=lambda tensor: (tensor.untyped_storage()._cdata, str(tensor.dtype), _span(tensor))):
        storage, (start, stop) = (tensor.untyped_storage()._cdata, tensor.dtype), _span(tensor)
        if storage == last and start < end:
            groups[-1].append(tensor)
            end = max(end, stop)
        else:
            groups.append([tensor])
            last, end = storage, stop
    return groups
