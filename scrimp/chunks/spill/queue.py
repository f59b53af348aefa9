"""A few threads that read and write spill files, with several large requests in flight, because a single one does not saturate a
disk.

Requests come in batches, the lowest rank first. When all requests of a batch have ended, one of the threads calls back with the
first error. So no caller uses or frees a batch's memory while a request still accesses it.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from scrimp.chunks.spill.file import SpillFile
from scrimp.errors import RunError

REQUEST = 4 << 20  # bytes, a multiple of the spill file's blocks
THREADS = 4

Then = Callable[[BaseException | None], None]


@dataclass(frozen=True, kw_only=True)
class Request:
    """A read or write of part of a region."""

    file: SpillFile
    key: str
    tensor: torch.Tensor
    at: int
    write: bool

    def run(self) -> None:
        (self.file.write if self.write else self.file.read)(self.key, self.tensor, self.at)


def region_requests(
    file: SpillFile, tensors: list[torch.Tensor], *, at: Sequence[int] | None = None, write: bool
) -> list[Request]:
    """Requests for a file's regions in order, each from its own byte on, to or from one flat tensor per region."""

    def parts() -> Iterator[Request]:
        for key, tensor, first in zip(file.regions, tensors, at or [0] * len(tensors), strict=True):
            step = REQUEST // tensor.element_size()
            for start in range(0, tensor.numel(), step):
                place = first + start * tensor.element_size()
                yield Request(file=file, key=key, tensor=tensor[start : start + step], at=place, write=write)

    return list(parts())


class _Batch:
    def __init__(self, waiting: list[Request], then: Then) -> None:
        self.left = len(waiting)
        self.nbytes = sum(request.tensor.nbytes for request in waiting)
        self.then = then
        self.began: float | None = None
        self.error: BaseException | None = None


class SpillQueue:
    """The threads and their queue. `read_rate` and `write_rate`: best rate of a batch, in bytes per second, with checksums."""

    def __init__(self) -> None:
        self.read_rate = self.write_rate = 0.0
        self._waiting: list[tuple[int, int, Request, _Batch]] = []
        self._count = itertools.count()
        self._ready = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._closed = self._resting = False

    def start(self, rank: int, batch: list[Request], then: Then) -> None:
        """Start a batch of reads or of writes; one of the threads calls `then` with the first error."""
        shared = _Batch(batch, then)
        with self._ready:
            if self._closed:
                raise RunError("the queue of spill files is closed")
            for request in batch:
                heapq.heappush(self._waiting, (rank, next(self._count), request, shared))
            while len(self._threads) < min(THREADS, len(self._waiting)):
                thread = threading.Thread(target=self._run, name=f"spill files {len(self._threads)}", daemon=True)
                self._threads.append(thread)
                thread.start()
            self._ready.notify(len(batch))

    def run(self, batch: list[Request]) -> None:
        """Run a batch and wait for it."""
        if not batch:
            return
        if self._resting:
            for request in batch:
                request.run()
            return
        over, errors = threading.Event(), []

        def then(error: BaseException | None) -> None:
            errors.append(error)
            over.set()

        self.start(0, batch, then)
        over.wait()
        if errors[0] is not None:
            raise errors[0]

    def rest(self) -> None:
        """End the threads; from then on `run` works in the calling thread."""
        self._resting = True
        self.close()

    def close(self) -> None:
        """End the threads; requests that have not started are dropped."""
        with self._ready:
            self._closed = True
            self._waiting.clear()
            self._ready.notify_all()
        if threading.current_thread() not in self._threads:  # such a thread may hold the last reference to the queue's owner
            for thread in self._threads:
                thread.join()

    def _run(self) -> None:
        while True:
            with self._ready:
                while not self._waiting and not self._closed:
                    self._ready.wait()
                if self._closed:
                    return
                _, _, request, batch = heapq.heappop(self._waiting)
                if batch.began is None:
                    batch.began = time.perf_counter()
            error: BaseException | None = None
            if batch.error is None:  # else the batch has failed already
                try:
                    request.run()
                except BaseException as caught:
                    error = caught
            with self._ready:
                batch.error = batch.error or error
                batch.left -= 1
                last = batch.left == 0
                if last and batch.error is None:
                    self._saw(batch.nbytes / max(time.perf_counter() - batch.began, 1e-9), write=request.write)
            if last:
                batch.then(batch.error)
            del request, batch, error  # so that an idle thread keeps nothing alive

    def _saw(self, rate: float, *, write: bool) -> None:
        if write:
            self.write_rate = max(self.write_rate, rate)
        else:
            self.read_rate = max(self.read_rate, rate)
