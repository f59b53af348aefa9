"""The initial placement of all layers on host, disk or device, and the least budgets with which one exists; allocates nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from scrimp.chunks import (
    DEVICE,
    DISK,
    DTYPES,
    HOST,
    PAGE,
    STAGES,
    AdamW,
    ChunkTable,
    Field,
    LayerSpace,
    Optimizer,
    Shards,
    Tier,
    optimized,
    placement_nbytes,
    tile_numel,
)
from scrimp.engine.setup.budget import Budget
from scrimp.errors import FitError
from scrimp.exchange import residual_nbytes
from scrimp.ledger import format_least, format_nbytes


@dataclass(frozen=True, kw_only=True)
class Placement:
    """A placement with `away` layers off the host, and what one rank then needs on each tier. `streaming_nbytes`: host buffers
    for masters and states of layers on disk; `stage_nbytes`: one tile of them."""

    away: int
    host_nbytes: int
    device_nbytes: int
    disk_nbytes: int = 0
    streaming_nbytes: int = 0
    stage_nbytes: int = 0

    @property
    def needed_nbytes(self) -> int:
        """Bytes on the host."""
        return self.host_nbytes + self.streaming_nbytes

    def staged_nbytes(self, room_nbytes: int) -> int:
        """Bytes of host buffers for updates from disk: as many staging buffers as fit."""
        if not self.stage_nbytes:
            return self.streaming_nbytes
        stages = max(1, min(STAGES, (room_nbytes - self.host_nbytes) // self.stage_nbytes))
        return max(self.stage_nbytes * stages, self.streaming_nbytes)


class Fit:
    """Chooses the initial placement. `residual`: format of the residuals that a sparse exchange keeps on the host. `world`: ranks
    that shard model data. `ranks_here`: ranks on this host."""

    def __init__(
        self, table: ChunkTable, budget: Budget, *, precision: str, optimizer: Optimizer, micro_batches: int, world: int,
        ranks_here: int, residual: str | None = None,
    ) -> None:  # fmt: skip
        self._table, self._budget, self._optimizer = table, budget, optimizer
        self._world, self.ranks_here, self._residual = world, ranks_here, residual
        self._dtypes = [torch.float32 if layer.wide else DTYPES[precision] for layer in table.layers]
        self._shards = Shards(table=table, world=world, rank=0)
        self._rows = [
            placement_nbytes(self._shards, k, dtype, optimizer.fields, micro_batches) for k, dtype in enumerate(self._dtypes)
        ]
        self._kept = [residual_nbytes(residual, self._shards.trained_numel(k)) if residual else 0 for k in range(len(self._rows))]
        self._total = sum(sum(row) for row in self._rows) + sum(self._kept)
        self._largest = max((self._needed(layer) for layer in table.layers), default=0)
        self.room_nbytes = budget.host_nbytes // ranks_here  # this rank's share of the host

    def places(self) -> list[Tier]:
        """The first tier of each layer: the host. If that is full, the last layers go to disk with their masters and states.
        Without a disk the first layers go to the device, which leaves room there for at least one more layer."""
        self._check_device()
        found = self._first(self.room_nbytes)
        if found is None:
            raise self._too_small()
        self._check_disk(found)
        count, away = len(self._rows), found.away
        if self._budget.disk is not None:
            return [HOST] * (count - away) + [DISK] * away
        return [DEVICE] * away + [HOST] * (count - away)

    def least_host_nbytes(self, offloaded_nbytes: int = 0, *, on_device: int | None = None) -> int:
        """The least `Memory(host=...)` that leaves so many bytes of each rank's share for activations, with at most so many
        layers on the device. Not every larger host works, because a larger host first takes more layers and staging buffers."""
        rooms = []
        for placement in self._allowed():
            if self._budget.disk is None and on_device is not None and placement.away > on_device:
                break
            for stages in range(1, STAGES + 1) if placement.stage_nbytes else (1,):
                streaming = max(placement.streaming_nbytes, stages * placement.stage_nbytes if offloaded_nbytes else 0)
                room = placement.host_nbytes + streaming + offloaded_nbytes
                found = self._first(room)
                if found is not None and (
                    not offloaded_nbytes or found.host_nbytes + found.staged_nbytes(room) + offloaded_nbytes <= room
                ):
                    rooms.append(room)
        return min(rooms) * self.ranks_here

    def _first(self, room_nbytes: int) -> Placement | None:
        return next((found for found in self._allowed() if found.needed_nbytes <= room_nbytes), None)

    def _allowed(self) -> Iterator[Placement]:
        """Placements that the other tiers allow, the most layers on the host first."""
        if self._budget.disk is not None:
            yield from self._on_disk()
            return
        for placement in self._on_device():
            if placement.away and placement.device_nbytes > self._budget.plan_nbytes:
                return
            yield placement

    def _on_disk(self) -> Iterator[Placement]:
        host, disk, streaming, numel = self._total, 0, 0, 0
        fields: tuple[Field, ...] = ()
        yield Placement(away=0, host_nbytes=host, device_nbytes=self._largest)
        for away, k in enumerate(reversed(range(len(self._rows))), start=1):
            rest, trained = self._rows[k][2], self._shards.trained_numel(k)
            kept = optimized(self._dtypes[k], self._optimizer.fields)
            host, streaming, numel = host - rest, max(streaming, rest), max(numel, trained)
            disk += sum(-(-field.nbytes(trained) // PAGE) * PAGE for field in kept)
            fields = max(fields, kept, key=len)
            yield Placement(
                away=away,
                host_nbytes=host,
                device_nbytes=self._largest,
                disk_nbytes=disk,
                streaming_nbytes=streaming,
                stage_nbytes=sum(field.nbytes(min(tile_numel(numel), numel)) for field in fields),
            )

    def _on_device(self) -> Iterator[Placement]:
        host, device = self._total, self._largest
        yield Placement(away=0, host_nbytes=host, device_nbytes=device)
        for k, row in enumerate(self._rows):
            placement = sum(row) + self._kept[k]
            # With one rank a layer placed on the device is its own storage.
            device += placement + (0 if self._world == 1 else self._table.layers[k].numel * self._dtypes[k].itemsize)
            host -= placement
            yield Placement(away=k + 1, host_nbytes=host, device_nbytes=device)

    def _needed(self, layer: LayerSpace) -> int:
        """Bytes that must be on the device while a layer runs."""
        return sum(self._table.layers[other].numel * self._dtypes[other].itemsize for other in layer.needs)

    # Errors.

    def _check_device(self) -> None:
        for layer in self._table.layers:
            nbytes = self._needed(layer)
            if nbytes > self._budget.device_nbytes:
                largest = max(layer.slots, key=lambda slot: slot.numel)
                raise FitError(
                    f"layer '{layer.path}' has {format_nbytes(nbytes)} of weights, the device budget is "
                    f"{format_nbytes(self._budget.device_nbytes)} ({self._budget.device_origin}); its largest parameter is "
                    f"{largest.name} {largest.shape}. The least for the weights of every layer is "
                    f"Memory(device='{format_least(self._largest)}'); the activations of a batch come on top, and the first step "
                    "says how much they take. Or split the layer into smaller modules",
                    least_nbytes=self._largest,
                    tier="device",
                )

    def _check_disk(self, found: Placement) -> None:
        free = self._budget.disk_free_nbytes
        needed = found.disk_nbytes * self.ranks_here
        if free is None or needed <= free:
            return
        most = [placement for placement in self._on_disk() if placement.disk_nbytes * self.ranks_here <= free][-1]
        raise FitError(
            f"there is no room for spill files of {format_nbytes(needed)} ({needed} bytes: masters and states of {found.away} of "
            f"{len(self._rows)} layers, {self.ranks_here} ranks here): {format_nbytes(free)} are free in {self._budget.disk}. "
            f"Make room there for {format_least(needed)} in all, give Memory(disk=...) a folder on a larger disk, or keep more "
            f"on the host: Memory(host='{format_least(most.needed_nbytes * self.ranks_here)}') is the least with this disk",
            least_nbytes=needed,
            tier="disk",
        )

    def _too_small(self) -> FitError:
        budget = self._budget
        weights, gradients, rest = (sum(row[i] for row in self._rows) for i in range(3))
        least = self.least_host_nbytes()
        smaller = isinstance(self._optimizer, AdamW) and self._optimizer.state == "fp32"
        if budget.disk is not None:
            streaming = [*self._on_disk()][-1].streaming_nbytes
            words = (
                f"Even with all masters and states on disk {format_nbytes(weights + gradients + streaming)} of model data "
                f"must be on this rank's host (weights {format_nbytes(weights)}, gradients {format_nbytes(gradients)}, "
                f"{format_nbytes(streaming)} to stream masters and states), its share of the host budget is "
                f"{self._share()}. The least that works is Memory(host='{format_least(least)}'); more ranks need less each"
            )
        else:
            device = next(found for found in self._on_device() if found.needed_nbytes <= self.room_nbytes).device_nbytes
            disk = [*self._on_disk()][-1]
            words = (
                f"model data takes {format_nbytes(self._total)} on this rank's host (weights {format_nbytes(weights)}, gradients "
                f"{format_nbytes(gradients)}, optimizer {format_nbytes(rest)}"
                f"{f', residuals {format_nbytes(sum(self._kept))}' if self._residual else ''}), its share of the host budget is "
                f"{self._share()}, and the device has no room for the rest: {format_nbytes(budget.device_nbytes)} "
                f"({budget.device_origin}). The least that works is Memory(host='{format_least(least)}') with this device budget"
                f"; or Memory(device='{format_least(budget.device_for(device))}') with this host budget, and more for activations"
            ) + (
                ""
                if self._residual
                else f"; or Memory(disk=folder, host='{format_least(disk.needed_nbytes * self.ranks_here)}') with "
                f"{format_least(disk.disk_nbytes * self.ranks_here)} free in the folder; or more ranks"
            )
        return FitError(
            words + ("; AdamW(state='int8') takes less, but changes numerical results" if smaller else ""),
            least_nbytes=least,
            tier="host",
        )

    def _share(self) -> str:
        origin = f"{self._budget.host_origin}, {self.ranks_here} ranks here"
        return f"{format_nbytes(self.room_nbytes)} ({origin})"
