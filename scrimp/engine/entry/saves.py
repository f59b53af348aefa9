"""The save that runs in the background: one thread per rank writes, and the ranks agree when its error is raised.

An error must be raised in the same call on every rank, or the others would wait for this one. On one rank that is the next call.
On several, rank 0 publishes with its first call after the end of the save that all ranks look for the outcome two calls later:
until then every rank has communicated with rank 0, so all know it. Calls that wait for the save, as `save` and `load` do, raise
at once, on all ranks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from scrimp.checkpoint import Save, Snapshot
from scrimp.chunks import Store
from scrimp.errors import CheckpointError

CALLS_AHEAD = 2


class _Running:
    def __init__(self, save: Save, snapshot: Snapshot, store: Store) -> None:
        self.save, self.snapshot, self.store = save, snapshot, store
        self.error: BaseException | None = None
        self.raise_at: int | None = None
        self.thread = threading.Thread(target=self._run, name="the save in the background")  # no daemon: the exit waits for it

    def _run(self) -> None:
        try:
            self.save.run(self.snapshot.write)
        except BaseException as error:
            self.error = error
        finally:
            self.snapshot.close()

    def end(self) -> None:
        self.thread.join()
        nothing: Callable[[int], None] = lambda _: None  # noqa: E731
        self.store.before_update, self.store.before_edit, self.store.free_host = nothing, nothing, lambda: None
        if self.error is not None:
            raise CheckpointError(
                f"the save of {self.save.goal} in the background failed: {self.error}. The checkpoint that was there before is "
                "as it was, and the engine can go on. This call did nothing: make it again"
            ) from self.error


class Saves:
    """At most one runs."""

    def __init__(self) -> None:
        self._running: _Running | None = None
        self._waited = 0.0  # seconds of saves that have ended

    def start(self, save: Save, snapshot: Snapshot, store: Store) -> None:
        assert self._running is None
        self._running = _Running(save, snapshot, store)
        self._running.thread.start()

    @property
    def active(self) -> bool:
        """Whether a save is running, or its outcome is not known to all ranks yet."""
        return self._running is not None

    def check(self, number: int) -> None:
        """In the call of this number: raise the error of a save that has ended, if all ranks do it now."""
        running = self._running
        if running is None:
            return
        agreement = running.save.agreement
        if agreement.wire.world == 1:
            if not running.thread.is_alive():
                self.finish()
            return
        key = f"{agreement.key}/raised"
        if agreement.wire.rank == 0 and running.raise_at is None and not running.thread.is_alive():
            running.raise_at = number + CALLS_AHEAD
            agreement.store.set(key, str(running.raise_at))
        elif running.raise_at is None and agreement.store.check([key]):
            running.raise_at = int(agreement.store.get(key))
        if running.raise_at is not None and number >= running.raise_at:
            self.finish()

    def finish(self) -> None:
        """Wait for the save, and raise its error."""
        running, self._running = self._running, None
        if running is not None:
            try:
                running.end()
            finally:
                self._waited += running.snapshot.lap()

    def lap(self) -> float | None:
        """Seconds since the last call that updates waited for a save; None if there was no save."""
        if self._running is not None:
            return self._running.snapshot.lap()
        waited, self._waited = self._waited, 0.0
        return waited or None
