"""The store of all model data: a placement for each layer, and one flat device storage per layer that is filled and emptied.

A layer's device storage is one object for the engine's lifetime. Eviction empties it and a fetch fills it again, so parameters,
and views of them that autograd saved, stay valid. A gradient overwrites its weight, which the step no longer needs. The placement
of a layer has weights in compute precision, and fp32 master weights and optimizer states for trained parameters. In 16 bits the
gradient overwrites the weight there too (14 bytes per parameter), unless micro-batches are accumulated. In fp32 the weight is its
own master and the gradient has a separate arena (16).

With several ranks each chunk is cut into equal shards, and a rank holds only its shards: a fetch is an all-gather, and retiring a
layer's gradients is a reduce-scatter. With one rank a layer placed on the device *is* its device storage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch

from scrimp.chunks.store.disk_tier import Spilling, spill_file
from scrimp.chunks.store.gradients import retire, take
from scrimp.chunks.store.migrate import migrate
from scrimp.chunks.store.placement import DEVICE, DISK, HOST, STREAMED, Opened, Placement, Tier, optimized, placement_nbytes
from scrimp.chunks.store.regroup import Regrouping, absent, regroup
from scrimp.chunks.tables.optimizers import AdamW, Optimizer
from scrimp.chunks.tables.shards import Shards
from scrimp.chunks.tables.table import ChunkTable, Slot, strides
from scrimp.chunks.tables.tiling import Tiling
from scrimp.chunks.transfer.collectives import Wire
from scrimp.chunks.transfer.copy_streams import CopyStreams, Event, Traffic
from scrimp.chunks.transfer.host_arena import arena
from scrimp.chunks.transfer.staged_copy import carry
from scrimp.chunks.worker.worker import Gate
from scrimp.ledger import Books

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class Store:
    """Model data of one rank. `wire`: the ranks that shard it. `ranks`: all ranks that train together, if more. `sparse`: they
    exchange sparse gradients. `tiling`: of parameters that a plan splits. `outside`: this rank does not train, and its
    placements are empty, until `regroup` brings it in."""

    def __init__(
        self,
        table: ChunkTable,
        *,
        precision: str,
        device: torch.device,
        optimizer: Optimizer,
        micro_batches: int,
        books: Books,
        wire: Wire,
        places: list[Tier] | None = None,
        disk: Path | None = None,
        ranks: Wire | None = None,
        sparse: bool = False,
        host_room_nbytes: int | None = None,
        tiling: Tiling | None = None,
        outside: bool = False,
    ) -> None:
        self.table = table
        self.tiling = tiling
        self.outside = outside
        self.precision = precision
        self.dtype = DTYPES[precision]
        self.device = device
        self.optimizer, self._fields = optimizer, optimizer.fields
        self.books = books
        self.ledger = books.device
        self.wire, self.ranks = wire, ranks or wire
        self.sparse = sparse
        # For layers placed on the device gradients are consumed on arrival, without a buffer. Adam needs a step's whole gradient.
        self.consumed = sparse and wire.world == 1 and (micro_batches == 1 or not isinstance(optimizer, AdamW))
        self.copy_streams = CopyStreams(device)
        self.traffic = Traffic()
        self.micro_batches = micro_batches
        self.pending = False  # accumulated gradients are kept between calls
        self.before_change: Callable[[], None] = lambda: None  # lets the meter read its peak before resident bytes change
        self.before_update: Callable[[int], None] = lambda _: None  # before a layer's masters and states change, in any thread
        self.before_edit: Callable[[int], None] = lambda _: None  # before anything else of a layer changes, or moves
        self.free_host: Callable[[], None] = lambda: None  # frees host memory that a save in the background holds
        self.host_room_nbytes = host_room_nbytes  # this rank's share of the host
        self.own: Callable[[torch.Tensor], None] = lambda _: None  # tells the meter not to count a tensor
        self.moved: Callable[[int], None] = lambda _: None  # called after a layer has migrated
        self.residual_bytes: Callable[[int], int] = lambda _: 0  # bytes of residuals that go to the device with a layer
        self.shards = Shards(table=table, world=wire.world, rank=wire.rank)
        self._disk = disk
        self._opened: dict[int, Opened] = {}
        self._arriving: dict[int, list[Event]] = {}
        self.leaving: dict[int, list[Event]] = {}
        self._wanted: set[int] = set()  # layers with a buffer on the device, whose weights are still being updated
        self.coming_down: dict[int, list[Event]] = {}  # copies down that the host has not waited for
        self.gates: dict[int, Gate] = {}  # of layers that are being updated
        self.as_gradients = [0] * len(table.layers)  # bytes of a layer's device storage that hold gradients now
        self.flats = [torch.empty(space.numel, dtype=self.dtype_of(k), device=device) for k, space in enumerate(table.layers)]
        for flat in self.flats:
            flat.untyped_storage().resize_(0)
        self.resident = [False] * len(table.layers)
        self.fetches = [0] * len(table.layers)
        tiers = enumerate(places or [HOST] * len(table.layers))
        self.placements = [absent(self, k) if outside else self.make_placement(k, tier) for k, tier in tiers]
        self.spill = Spilling(self.placements, self.shards, optimizer.fields, books.host, self.traffic)

    # Sizes.

    def dtype_of(self, layer: int) -> torch.dtype:
        return torch.float32 if self.table.layers[layer].wide else self.dtype

    def nbytes(self, layer: int) -> int:
        """Device bytes of a resident layer."""
        return self.table.layers[layer].numel * self.dtype_of(layer).itemsize

    def placement_nbytes(self, layer: int) -> tuple[int, int, int]:
        """Bytes of a layer's placement: (weights, separate gradients, masters and states)."""
        return placement_nbytes(self.shards, layer, self.dtype_of(layer), self._fields, self.micro_batches)

    def device_placement_nbytes(self, layer: int) -> int:
        """Device bytes of placing a layer there, in addition to the resident layer itself."""
        weights, gradients, rest = self.placement_nbytes(layer)
        shared = weights if self.wire.world > 1 else 0
        return rest + shared + (0 if self.consumed else gradients) + self.residual_bytes(layer)

    def host_nbytes(self) -> int:
        return self.books.host.total_nbytes

    def anchored(self, layer: int) -> bool:
        """Whether a layer's weights live in its device storage, so that it is never evicted."""
        return self.placements[layer].tier in (DEVICE, STREAMED) and self.wire.world == 1

    # Placements.

    def make_placement(self, layer: int, tier: Tier) -> Placement:
        """A placement with zeros. With one rank a placement on the device has its weights in the layer's device storage."""
        dtype, numel, trained = self.dtype_of(layer), self.shards.numel(layer), self.shards.trained_numel(layer)
        summed = self.shards.summed_numel(layer)
        own_master = dtype == torch.float32
        own_gradients = own_master or self.micro_batches > 1
        kept = optimized(dtype, self._fields)
        if tier == DEVICE:
            if self.wire.world == 1 and not self.resident[layer]:
                self.open(layer)
            self.before_change()
            zeros = partial(torch.zeros, device=self.device)
            placement = Placement(
                tier=tier,
                weights=self.flats[layer] if self.wire.world == 1 else zeros(numel, dtype=dtype),
                gradients=zeros(summed, dtype=dtype) if own_gradients and not self.consumed else None,
                master=None,
            )
            tensors = [zeros(field.numel(trained), dtype=field.dtype) for field in kept]
            self.charge_device(layer, 1)
        else:
            pinned = self.copy_streams.overlapped
            placement = Placement(
                tier=tier,
                weights=arena(numel, dtype, pinned=pinned),
                gradients=arena(summed, dtype, pinned=pinned) if own_gradients else None,
                master=None,
            )
            tensors = [] if tier == DISK else [arena(field.numel(trained), field.dtype) for field in kept]
            self.charge_host(layer, placement, 1)
        if tier == DISK:
            assert self._disk is not None
            placement.file = spill_file(self._disk, kept, trained, f"layer '{self.table.layers[layer].path}'")
            self.books.disk.charge("optimizer", sum(placement.file.regions.values()))
        else:
            placement.master, placement.states = (None, tensors) if own_master else (tensors[0], tensors[1:])
        return placement

    def charge_device(self, layer: int, sign: int) -> None:
        """Charge or free a placement on the device, without the layer's device storage."""
        weights, gradients, rest = self.placement_nbytes(layer)
        change = self.ledger.charge if sign > 0 else self.ledger.free
        change("optimizer", rest)
        change("gradients", 0 if self.consumed else gradients)
        if self.wire.world > 1:
            change("parameters", weights)

    def charge_host(self, layer: int, placement: Placement, sign: int) -> None:
        weights, gradients, rest = self.placement_nbytes(layer)
        change = self.books.host.charge if sign > 0 else self.books.host.free
        if placement.tier != STREAMED:
            change("parameters", weights)
            change("gradients", gradients)
        if placement.tier != DISK:
            change("optimizer", rest)

    @contextmanager
    def opened(self, layer: int, *, write: bool = False, read: bool = True) -> Iterator[Opened]:
        """A layer's data in memory. If it is on disk it is read, unless all of it is about to be written (`read=False`), and
        written back with `write`."""
        if layer in self._opened:
            yield self._opened[layer]
            return
        self.at_rest(layer)
        if write:
            self.before_edit(layer)
        with self.spill.staged(self.placements[layer], self.direct(layer), read=read, write=write) as data:
            self._opened[layer] = data
            try:
                yield data
            finally:
                del self._opened[layer]

    def wait(self) -> None:
        """Wait until nothing is being written to any placement, in memory or on disk."""
        for layer in range(len(self.placements)):
            self.at_rest(layer)
        self.spill.wait()

    def at_rest(self, layer: int) -> None:
        """Wait until nothing is being written to a layer's placement."""
        gate = self.gates.get(layer)
        if gate is not None:
            gate.wait()
            self.gates.pop(layer, None)  # only after success, so that the next caller sees the failure too
        self.arrived_on_host(layer)

    def arrived_on_host(self, layer: int) -> None:
        """Wait until the host may read gradients that were copied down."""
        for event in self.take_coming_down(layer):
            event.synchronize()

    def take_coming_down(self, layer: int) -> list[torch.cuda.Event]:
        """Hands over the events of copies down, to a caller that waits for them elsewhere."""
        return [event for event in self.coming_down.pop(layer, []) if event is not None]

    def direct(self, layer: int) -> Opened:
        """A layer's data in its placement, without waiting: for whoever updates it."""
        return self.placements[layer].opened(layer, self.shards, self._fields)

    def gradients_of(self, layer: int, slot: Slot) -> Iterator[torch.Tensor]:
        self.at_rest(layer)
        placement = self.placements[layer]
        for spans in self.shards.pieces(layer, slot):
            yield placement.weights[spans.weights] if placement.gradients is None else placement.gradients[spans.gradients]

    def adopt(self, layer: int, slot: Slot, values: torch.Tensor) -> None:
        """Write a parameter's initial values to weight and master."""
        if self.outside:
            return
        source = values.detach().reshape(-1) if self.tiling is None else self.tiling.cut(slot.name, values.detach())
        with self.opened(layer, write=True) as data:
            if slot.share is not None:
                carry(data.weights[slot.start : slot.stop], source)  # all of it, also what other ranks update
            for piece in data.pieces(slot):
                carry(piece.weight, source[piece.inside])
                if slot.trainable and not data.own_master:
                    carry(piece.master, source[piece.inside])

    def restore(self, layer: int, slots: list[Slot]) -> None:
        """After a skipped update: restore the weights that gradients overwrote."""
        if self.placements[layer].gradients is None:
            with self.opened(layer) as data:
                for piece in (piece for slot in slots for piece in data.pieces(slot)):
                    piece.weight.copy_(piece.master)
            self.settled(layer)

    def settled(self, layer: int) -> None:
        """The storage of a layer that stays on the device holds weights again, not gradients."""
        self.ledger.move(self.as_gradients[layer], source="gradients", target="parameters")
        self.as_gradients[layer] = 0

    def migrate(self, layer: int, tier: Tier) -> None:
        """Move a layer between host and device; to or from `STREAMED` only its weights move."""
        self.before_edit(layer)
        migrate(self, layer, tier)
        self.moved(layer)

    def regroup(self, change: Regrouping) -> None:
        """Shard all layers over another group of ranks."""
        regroup(self, change)

    def passed(self, layer: int, updated: Event, placement: Event) -> None:
        """A streamed update is running: new weights are ready, and states are back on the host, after these events."""
        self._arriving[layer] = [updated]
        self.coming_down[layer] = [placement]

    # Layers on the device.

    def device_view(self, layer: int, slot: Slot) -> torch.Tensor:
        return self.flats[layer].as_strided(slot.shape, strides(slot.shape), slot.start)

    def open(self, layer: int) -> None:
        """Allocate a layer's device storage, without content."""
        nbytes, padding = self.nbytes(layer), self._padding_nbytes(layer)
        self.before_change()
        self.flats[layer].untyped_storage().resize_(nbytes)
        self.ledger.charge("parameters", nbytes - padding)
        self.ledger.charge("padding", padding)
        self.resident[layer] = True

    def fetch(self, layer: int) -> None:
        """Start to copy a layer to the device; call `arrived` before using it."""
        if self.resident[layer]:
            return
        self.open(layer)
        self.fetches[layer] += 1
        placement = self.placements[layer]
        if self.wire.world == 1:
            gate = self.gates.get(layer)
            if gate is None or gate.open:
                self._send(layer)
            else:
                self._wanted.add(layer)  # allocated now, copied once the update is done
            return
        self.at_rest(layer)
        for (start, stop), shard in zip(self.table.chunks(layer), self.shards.chunks(layer), strict=True):
            self.wire.gather(placement.weights[shard], self.flats[layer][start:stop])
            if placement.tier != DEVICE:
                self.traffic.up_nbytes += placement.weights[shard].nbytes

    def _send(self, layer: int) -> None:
        self.at_rest(layer)
        weights = self.placements[layer].weights
        self._arriving[layer] = [self.copy_streams.up(self.flats[layer], weights)]
        self.traffic.up_nbytes += weights.nbytes

    def arrived(self, layer: int) -> None:
        if layer in self._wanted:
            self._wanted.remove(layer)
            self._send(layer)
        if layer in self.gates and self.anchored(layer):
            self.gates[layer].wait()
            self.gates.pop(layer, None)
        for event in self._arriving.pop(layer, []):
            self.copy_streams.wait(event)

    def drop(self, layer: int) -> None:
        """Evict a layer, after copies that still use it."""
        if not self.resident[layer] or self.anchored(layer):
            return
        self._wanted.discard(layer)
        self.arrived(layer)
        for event in self.leaving.pop(layer, []):
            self.copy_streams.wait(event)
        self.before_change()
        self.flats[layer].untyped_storage().resize_(0)
        padding, gradients = self._padding_nbytes(layer), self.as_gradients[layer]
        self.ledger.free("parameters", self.nbytes(layer) - padding - gradients)
        self.ledger.free("gradients", gradients)
        self.ledger.free("padding", padding)
        self.as_gradients[layer] = 0
        self.resident[layer] = False

    # Gradients.

    def receive(self, layer: int, slot: Slot, gradient: torch.Tensor, *, first: bool) -> None:
        """A gradient overwrites its weight on the device, where the layer must be resident; or goes to its own buffer there.
        `first`: the first gradient of the step for this slot; later ones are added."""
        own = self.placements[layer].gradients
        if self.anchored(layer) and own is not None:
            target = own[slot.start : slot.stop].view(slot.shape)
            target.copy_(gradient) if first else target.add_(gradient)
            return
        self.device_view(layer, slot).copy_(gradient)
        nbytes = slot.numel * self.dtype_of(layer).itemsize
        self.as_gradients[layer] += nbytes
        self.ledger.move(nbytes, source="parameters", target="gradients")

    def retire(self, layer: int, arrived: list[tuple[Slot, bool]]) -> None:
        """Average a layer's gradients over the ranks and copy them to the layer's tier; `drop` then evicts the layer. Each slot
        has a flag: the first gradient of the step is copied, later ones are added. Slots without a gradient do not change."""
        if not self.anchored(layer):
            retire(self, layer, arrived)

    def take(self, layer: int, slot: Slot, gradient: torch.Tensor, *, first: bool) -> None:
        """Under a plan: a gradient, flat, goes to the layer's tier at once. It has either all elements that this rank
        accumulates, or those that it updates."""
        take(self, layer, slot, gradient, first=first)

    def _padding_nbytes(self, layer: int) -> int:
        return self.table.layers[layer].padding * self.dtype_of(layer).itemsize
