"""The ranks' agreement on a save, by the process group's key-value store, which waits for nobody.

In the background no rank starts a collective, so the save cannot disturb a step. Each rank reports what it wrote, or why it could
not. Rank 0 waits for all reports, commits, and publishes the outcome, for which the others wait.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from scrimp.chunks import Wire
from scrimp.errors import CheckpointError, ScrimpError
from scrimp.move import default_store, group_timeout

TIMEOUT = timedelta(minutes=30)  # torch's own, where the group's cannot be read
ENDING = timedelta(seconds=60)  # once this process is about to end
FIRST_SLEEP, LONGEST_SLEEP = 1e-3, 5e-2


class Agreement:
    """One save. Every rank makes it at the same time, in the thread that may communicate."""

    def __init__(self, wire: Wire, goal: Path) -> None:
        self.wire, self._goal = wire, goal
        if wire.world > 1:
            drawn = int.from_bytes(torch.randint(256, (7,), generator=_own(), dtype=torch.uint8).numpy().tobytes(), "big")
            self.key = f"scrimp/saves/{int(wire.from_first(torch.tensor([drawn])))}"
            self.store: Any = default_store()
            self._timeout = group_timeout(wire.group, wire.device) or TIMEOUT

    def run(self, write: Callable[[], Any], commit: Callable[[list[Any]], None], undo: Callable[[], None], *, meet: bool) -> None:
        """`write` returns JSON; rank 0 calls `commit` with that of all ranks, or `undo` if one of them failed. `meet`: the ranks
        may also communicate, which shows at once if one of them has died."""
        error: BaseException | None = None
        mine: Any = None
        try:
            mine = write()
        except BaseException as caught:
            error = caught
        if self.wire.world == 1:
            outcome = self._conclude([mine], error, commit, undo)
        else:
            outcome = self._share(mine, error, commit, undo, meet=meet)
        if error is not None:
            raise _named(error, self._goal) from error
        if outcome:
            raise CheckpointError(outcome)

    def _share(
        self,
        mine: Any,
        error: BaseException | None,
        commit: Callable[[list[Any]], None],
        undo: Callable[[], None],
        *,
        meet: bool,
    ) -> str:
        row = {"failed": None if error is None else _text(error, self._goal), "wrote": mine}
        self.store.set(f"{self.key}/{self.wire.rank}", json.dumps(row))
        if meet:
            self.wire.meet()
        if self.wire.rank:
            if meet:
                self.wire.meet()
            outcome = str(json.loads(self._await("outcome", 2 * self._timeout, "rank 0 has not ended the save")))
            self.store.set(f"{self.key}/read/{self.wire.rank}", "")
            return outcome
        rows, missing = [], ""
        for rank in range(self.wire.world):
            try:
                rows.append(json.loads(self._await(str(rank), self._timeout, f"rank {rank} has not written its part")))
            except CheckpointError as late:
                missing = str(late)
                break
            with suppress(RuntimeError):  # a store that cannot delete
                self.store.delete_key(f"{self.key}/{rank}")
        failed = [f"rank {rank}: {row['failed']}" for rank, row in enumerate(rows) if row["failed"] is not None]
        known = CheckpointError(failed[0] if failed else missing) if failed or missing else None
        outcome = self._conclude([row["wrote"] for row in rows], known, commit, undo)
        self.store.set(f"{self.key}/outcome", json.dumps(outcome))
        if meet:
            self.wire.meet()
        if not missing:
            self._let_all_read()
        return outcome

    def _let_all_read(self) -> None:
        """Rank 0's process may hold the store, and may be about to end."""
        with suppress(CheckpointError, RuntimeError):  # a rank that has died reads nothing
            for rank in range(1, self.wire.world):
                self._await(f"read/{rank}", ENDING, f"rank {rank} has not read the outcome")
                self.store.delete_key(f"{self.key}/read/{rank}")

    def _conclude(
        self, rows: list[Any], error: BaseException | None, commit: Callable[[list[Any]], None], undo: Callable[[], None]
    ) -> str:
        """Why the save failed; empty if it did not."""
        try:
            if error is not None:
                undo()
                return _text(error, self._goal)
            commit(rows)
        except BaseException as caught:
            return _text(caught, self._goal)
        return ""

    def _await(self, key: str, timeout: timedelta, words: str) -> bytes:
        begin, sleep = time.monotonic(), FIRST_SLEEP
        while True:
            try:
                if self.store.check([f"{self.key}/{key}"]):
                    found: bytes = self.store.get(f"{self.key}/{key}")
                    return found
            except RuntimeError as error:
                raise CheckpointError(f"{self._goal} could not be written: the ranks cannot reach each other: {error}") from error
            limit = timeout if threading.main_thread().is_alive() else min(timeout, ENDING)
            if time.monotonic() - begin > limit.total_seconds():
                raise CheckpointError(f"{self._goal} could not be written: {words} for {limit.total_seconds():g} s")
            time.sleep(sleep)
            sleep = min(1.5 * sleep, LONGEST_SLEEP)


@contextmanager
def together(wire: Wire, where: Path, what: str = "written") -> Iterator[None]:
    """Turns an error on one rank into an error on all ranks at once, without a time-out. A collective."""
    error: BaseException | None = None
    try:
        yield
    except (OSError, ScrimpError) as caught:
        error = caught
    failed = wire.every(torch.tensor([int(error is not None)])).flatten().nonzero().flatten().tolist()
    if error is not None:
        raise _named(error, where, what) from error
    if failed:
        raise CheckpointError(f"{where} could not be {what}: rank {failed[0]} failed; see the error there")


def _named(error: BaseException, goal: Path, what: str = "written") -> BaseException:
    """An error of the system as one of a checkpoint; others as they are."""
    return CheckpointError(f"{goal} could not be {what}: {error}") if isinstance(error, OSError) else error


def _text(error: BaseException, goal: Path) -> str:
    named = _named(error, goal)
    return str(named) if isinstance(named, ScrimpError) else f"{goal} could not be written: {named!r}"


def _own() -> torch.Generator:
    """A generator of its own, so that the user's random state is untouched."""
    generator = torch.Generator()
    generator.seed()
    return generator
