"""One thread that does the host's part of training, overlapped with the step: updates of layers, and jobs that depend on them.

Jobs have a rank. Of the jobs whose data is ready the lowest rank runs first, so that layers needed first are done first, and no
job waits for data while another could run. Each job opens a gate. If a job fails, every gate opens and every wait raises its
error, so nothing hangs on a dead thread.
"""

from __future__ import annotations

import bisect
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from scrimp.chunks.worker.stopwatch import Stopwatch
from scrimp.errors import RunError

GLANCE = 1e-4  # seconds between two checks of what jobs wait for


class Awaited(Protocol):
    """Something that happens once, with the interface of a CUDA event."""

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


class Gate:
    """Opens when a job is done."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._open = threading.Event()

    @property
    def open(self) -> bool:
        return self._open.is_set()

    def wait(self) -> None:
        if not self._open.is_set():
            with self._worker.waited_for:
                self._open.wait()
        self._worker.check()

    def query(self) -> bool:
        return self.open

    def synchronize(self) -> None:
        self.wait()

    def _set(self) -> None:
        self._open.set()


@dataclass(frozen=True, order=True)
class _Job:
    rank: int
    number: int  # in the order of submission
    run: Callable[[], None] = field(compare=False)
    after: Sequence[Awaited] = field(compare=False)
    gate: Gate = field(compare=False)

    @property
    def ready(self) -> bool:
        return all(awaited.query() for awaited in self.after)


class Worker:
    """Runs jobs on one thread, which starts with the first job."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.waited_for = Stopwatch()  # time that others spend at gates
        self._busy, self._lap = Stopwatch(), (0.0, 0.0)
        self._jobs: list[_Job] = []  # by rank
        self._promised: set[Gate] = set()
        self._count = itertools.count()
        self._ready = threading.Condition()
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._closed = False

    def submit(self, rank: int, job: Callable[[], None], after: Sequence[Awaited] = ()) -> Gate:
        """Queue a job; it runs once everything in `after` has happened."""
        gate = Gate(self)
        with self._ready:
            self.check()
            if self._closed:
                raise RunError(f"{self._name} is closed")
            bisect.insort(self._jobs, _Job(rank, next(self._count), job, after, gate))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._ready.notify()
        return gate

    def promise(self) -> Gate:
        """A gate for work of more than one job: `keep` opens it, and so does a failure."""
        gate = Gate(self)
        with self._ready:
            self.check()
            self._promised.add(gate)
        return gate

    def keep(self, gate: Gate) -> None:
        with self._ready:
            self._promised.discard(gate)
        gate._set()

    def fail(self, error: BaseException) -> None:
        """Something that jobs depend on failed, in any thread: drop the remaining jobs and open every gate."""
        with self._ready:
            self._error = self._error or error
            gates = [*self._promised, *(job.gate for job in self._jobs)]
            self._jobs = []
            self._promised.clear()
        for gate in gates:
            gate._set()

    def lap(self) -> tuple[float, float]:
        """Seconds since the last call: running jobs, and others waiting at gates."""
        before, self._lap = self._lap, (self._busy.seconds, self.waited_for.seconds)
        return self._lap[0] - before[0], self._lap[1] - before[1]

    def check(self) -> None:
        """Raise the error of a job, if there was one."""
        if self._error is not None:
            advice = "; load the last checkpoint"
            words = f"{self._name} failed: {str(self._error).removesuffix(advice)}{advice}"
            raise RunError(words) from self._error

    def close(self) -> None:
        """Finish the remaining jobs, then end the thread."""
        with self._ready:
            self._closed = True
            self._ready.notify()
        if self._thread is not None:
            if self._thread is not threading.current_thread():  # this thread may hold the last reference to the worker's owner
                self._thread.join()
            self._thread = None

    def _next(self) -> _Job | None:
        """The ready job with the lowest rank; waits if none is ready."""
        while True:
            with self._ready:
                while not self._jobs and not self._closed:
                    self._ready.wait()
                if not self._jobs:
                    return None
                waiting = list(self._jobs)
            job = next((job for job in waiting if job.ready), waiting[0] if len(waiting) == 1 else None)
            if job is None:
                time.sleep(GLANCE)  # any of them may be the next
                continue
            with self._ready:
                if job in self._jobs:  # a failure empties the list
                    self._jobs.remove(job)
                    return job

    def _run(self) -> None:
        job: _Job | None = None
        try:
            while (job := self._next()) is not None:
                for awaited in job.after:
                    awaited.synchronize()
                with self._busy:
                    job.run()
                job.gate._set()
                job = None  # so that an idle thread keeps nothing alive
        except BaseException as error:
            self.fail(error)
            if job is not None:
                job.gate._set()
