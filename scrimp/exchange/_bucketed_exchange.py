"""One step's exchange: buckets that are filled as layers become ready, and sent in the same order on all ranks.

A bucket holds a few layers that are adjacent in backward, enough to be worth a message. It is sent when all of them are written
and all buckets before it were sent. So whatever the order in which layers become ready on a rank, collectives are the same on all
ranks, and one thread makes them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial

import torch

from scrimp.chunks import Gate, Wire, Worker
from scrimp.errors import MoveError, RunError
from scrimp.exchange._bucket import NOT_FINITE, PRESENT, Bucket, Part, misplaced, plan_bucket, put_part, row_error, seal
from scrimp.exchange._native_select import host_selection
from scrimp.exchange._packet import unpack

LARGEST = 1 << 16  # elements that the host kernel writes without threads
BUCKET_NBYTES = 64 << 10  # a few milliseconds of a slow network; larger messages would overlap less with the backward pass


@dataclass(frozen=True, kw_only=True)
class Member:
    """A layer that is exchanged: names and elements of its trained parameters, device of its rows, whether they are summed."""

    layer: int
    sizes: tuple[tuple[str, int], ...]
    device: torch.device
    summed: bool = False


@lru_cache(maxsize=4)  # called in every step, mostly with the same arguments
def plan_buckets(
    members: tuple[Member, ...], density: float, dtype: torch.dtype, small: int, nbytes: int = BUCKET_NBYTES
) -> tuple[tuple[tuple[int, ...], torch.device, Bucket], ...]:
    """Layers, device and bucket of each message, from members in the order of backward."""
    found: list[tuple[tuple[int, ...], torch.device, Bucket]] = []
    group: list[Member] = []

    def bucket_of(group: list[Member]) -> Bucket:
        sizes = [size for member in group for size in member.sizes]
        return plan_bucket(sizes, density, dtype, small, summed=group[0].summed)

    def close() -> None:
        if group:
            bucket = bucket_of(group)
            found.append((tuple(member.layer for member in group), group[0].device, bucket))
            group.clear()

    for member in members:
        if group and (group[0].device, group[0].summed) != (member.device, member.summed):
            close()
        group.append(member)
        if bucket_of(group).nbytes >= nbytes:
            close()
    close()
    return tuple(found)


class BucketedExchange:
    """The buckets of one step, from the first write to the received rows."""

    def __init__(
        self, step: int, plan: Sequence[tuple[tuple[int, ...], torch.device, Bucket]], wire: Wire, comm: Worker, number: int,
        stream: torch.cuda.Stream | None = None,
    ) -> None:  # fmt: skip
        """`number`: of the first message, counted over the whole run. `stream`: separate stream of the exchange, if rows are on a
        GPU: queued behind other work it would wait, and the other ranks with it."""
        self.step = step
        self._stream = stream
        self._put: list[list[torch.cuda.Event]] = [[] for _ in plan]  # rows are written after these
        self._arrived: list[torch.cuda.Event | None] = [None] * len(plan)
        self.buckets = [bucket for _, _, bucket in plan]
        self._devices = [device for _, device, _ in plan]
        self._wire, self._comm, self._number = wire, comm, number
        self._of_layer = {layer: k for k, (layers, _, _) in enumerate(plan) for layer in layers}
        self._where = {part.name: (k, part) for k, bucket in enumerate(self.buckets) for part in bucket.parts}
        self._missing = [set(layers) for layers, _, _ in plan]
        self._lock = threading.Lock()
        self._rows: list[torch.Tensor | None] = [None] * len(plan)
        self._came: list[torch.Tensor | None] = [None] * len(plan)
        self._heads: list[torch.Tensor | None] = [None] * len(plan)  # of every rank, if the rest is summed
        self._flags: list[list[bool] | None] = [None] * len(plan)  # of each part, whether any rank has content
        self._gates = [comm.promise() for _ in plan]
        self._gone = 0  # buckets that were submitted
        self.present: set[str] = set()  # on this rank
        self.flagged: set[str] = set()

    # Sending.

    def part(self, name: str) -> Part:
        return self._where[name][1]

    def dtype(self, name: str) -> torch.dtype:
        return self.buckets[self._where[name][0]].dtype

    def open(self, layer: int) -> None:
        """Allocate the rows of a layer's bucket; called in the thread whose meter counts them."""
        k = self._of_layer[layer]
        with self._lock:
            if self._rows[k] is None:
                row = self.buckets[k].row(self._devices[k])
                self._rows[k] = row
                world, bucket = self._wire.world, self.buckets[k]
                self._heads[k] = self._came[k] = row.view(1, -1)
                if world > 1:
                    length = bucket.head_nbytes if bucket.summed else bucket.nbytes
                    self._heads[k] = row.new_empty(world * length).view(world, -1)
                    self._came[k] = self._came[k] if bucket.summed else self._heads[k]

    def put(self, name: str, positions: torch.Tensor | None, values: torch.Tensor) -> None:
        k, part = self._where[name]
        row = self._rows[k]
        assert row is not None
        put_part(row, part, positions, values, self.buckets[k].dtype)
        self.present.add(name)

    def put_small(self, name: str, values: torch.Tensor) -> bool | None:
        """The same for few values that are sent whole, by the host kernel. Returns whether they are finite, or None if the
        kernel does not accept them."""
        k, part = self._where[name]
        row, kernel = self._rows[k], host_selection()
        assert row is not None
        if kernel is None or part.numel > LARGEST or not (row.is_cpu and values.is_cpu and values.is_contiguous()):
            return None
        sound = kernel.put(row, part.start, values, self.buckets[k].dtype)
        row[part.flag] = PRESENT if sound else NOT_FINITE
        (self.present if sound else self.flagged).add(name)
        return sound

    def packet(self, name: str) -> torch.Tensor:
        """The bytes of a parameter, which the caller fills."""
        k, part = self._where[name]
        row = self._rows[k]
        assert row is not None
        row[part.flag].fill_(PRESENT)
        self.present.add(name)
        return row[part.start : part.stop]

    def checked(self, name: str, sound: torch.Tensor) -> None:
        """Flag whether a parameter's gradient was finite, without waiting for the device."""
        k, part = self._where[name]
        row = self._rows[k]
        assert row is not None
        row[part.flag].fill_(NOT_FINITE).masked_fill_(sound, PRESENT)
        self.flagged.add(name)

    def done(self, layer: int) -> None:
        """All of a layer is written, or it has no gradient."""
        k = self._of_layer[layer]
        self.open(layer)
        with self._lock:
            if self._stream is not None and self._devices[k].type == "cuda":
                self._put[k].append(torch.cuda.current_stream(self._devices[k]).record_event())
            self._missing[k].discard(layer)
            while self._gone < len(self.buckets) and not self._missing[self._gone]:
                if self._wire.world == 1:  # no message needed, and waking the thread would slow down this one
                    self._comm.keep(self._gates[self._gone])
                else:
                    self._comm.submit(self._number + self._gone, partial(self._travel, self._gone))
                self._gone += 1

    def _travel(self, k: int) -> None:
        try:
            with self._separate(k):
                self._exchange(k)
        except MoveError as error:
            raise RunError(f"step {self.step}, gradients of {self._named(k)}: {error}") from error
        self._comm.keep(self._gates[k])

    @contextmanager
    def _separate(self, k: int) -> Iterator[None]:
        """Run on the exchange's stream, after the rows are written; who uses the received rows waits for it."""
        if self._stream is None or self._devices[k].type != "cuda":
            yield
            return
        for event in self._put[k]:
            self._stream.wait_event(event)
        with torch.cuda.device(self._devices[k]), torch.cuda.stream(self._stream):
            yield
        for tensor in (self._rows[k], self._heads[k]):
            if tensor is not None:
                tensor.record_stream(self._stream)
        self._arrived[k] = self._stream.record_event()

    def _await(self, k: int) -> None:
        event = self._arrived[k]
        if event is not None:
            torch.cuda.current_stream(self._devices[k]).wait_event(event)

    def _exchange(self, k: int) -> None:
        row, heads, bucket = self._rows[k], self._heads[k], self.buckets[k]
        assert row is not None
        assert heads is not None
        sent = row[: heads.shape[1]]
        seal(sent, self.step)
        self._wire.gather(sent, heads.view(-1))
        for rank in range(self._wire.world):
            trouble = row_error(heads[rank], self.step)
            if trouble is None and (place := misplaced(heads[rank], bucket)):
                trouble = f"has {place}"
            if trouble is not None:
                raise RunError(f"step {self.step}, gradients of {self._named(k)}: the packet of rank {rank} {trouble}")
        if bucket.summed:
            values = row[bucket.head_nbytes :].view(bucket.dtype)
            values.copy_(self._wire.sum(values.div_(self._wire.world)))

    def _named(self, k: int) -> str:
        parts = self.buckets[k].parts
        return parts[0].name if len(parts) == 1 else f"{parts[0].name} to {parts[-1].name}"

    # Received rows.

    def gate(self, layer: int) -> Gate:
        """Opens when a layer's bucket has arrived from all ranks."""
        return self._gates[self._of_layer[layer]]

    def wait(self) -> None:
        """Wait until all buckets have arrived."""
        for gate in self._gates:
            gate.wait()

    def rows(self, name: str) -> tuple[torch.Tensor, Bucket, Part]:
        k, part = self._where[name]
        came = self._came[k]
        assert came is not None
        self._await(k)
        return came, self.buckets[k], part

    def mine(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions and values that this rank sent of a parameter."""
        k, part = self._where[name]
        row = self._rows[k]
        assert row is not None
        assert part.how is not None
        return unpack(row[part.start : part.stop], part.how, self.buckets[k].dtype)

    def present_anywhere(self, name: str) -> bool:
        if self._wire.world == 1:
            return name in self.present
        k, part = self._where[name]
        if self._flags[k] is None:
            self._await(k)
            heads, flags = self._heads[k], [part.flag for part in self.buckets[k].parts]
            assert heads is not None
            self._flags[k] = (heads[:, flags[0] : flags[-1] + 1] == PRESENT).any(0).tolist()
        found = self._flags[k]
        assert found is not None
        return found[part.flag - self.buckets[k].parts[0].flag]

    def bad(self) -> tuple[str, int] | None:
        """The first parameter whose gradient is not finite, and its rank."""
        for k, (bucket, heads) in enumerate(zip(self.buckets, self._heads, strict=True)):
            assert heads is not None
            self._await(k)
            first, last = bucket.parts[0].flag, bucket.parts[-1].flag + 1
            found = (heads[:, first:last] == NOT_FINITE).nonzero()
            if found.numel():
                rank, at = found[0].tolist()
                return bucket.parts[at].name, rank
        return None

    def give_up(self) -> None:
        """Abandon the step before anything was sent, and open all gates."""
        for gate in self._gates:
            self._comm.keep(gate)
