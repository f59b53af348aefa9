"""Ranks meet those of their own attempt, whatever earlier attempts left in the store, in any order of arrival."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

from scrimp.engine.setup.meeting import LEADER, meet

LIMIT = timedelta(seconds=20)


class Memory:
    """A store in this process."""

    def __init__(self) -> None:
        self.data: dict[str, str] = {}
        self.lock = threading.Lock()

    def set(self, key: str, value: str, /) -> None:
        with self.lock:
            self.data[key] = value

    def get(self, key: str, /) -> bytes:
        with self.lock:
            return self.data[key].encode()

    def check(self, keys: list[str], /) -> bool:
        with self.lock:
            return all(key in self.data for key in keys)


def attempt(store: Memory, world: int, late: int | None = None) -> set[str]:
    """All ranks at once, but for one that comes later."""

    def come(rank: int) -> str:
        time.sleep(0.2 if rank == late else 0)
        return meet(store, rank, world, LIMIT)

    with ThreadPoolExecutor(world) as pool:
        return {*pool.map(come, range(world))}


@pytest.mark.parametrize("late", [None, 0, 2])
def test_attempts_have_prefixes_of_their_own(late: int | None) -> None:
    """Also if rank 0 comes last, when the others find only the leader of an earlier attempt."""
    store, seen = Memory(), set()
    for _ in range(3):
        found = attempt(store, 3, late)
        assert len(found) == 1
        seen |= found
    assert len(seen) == 3


def test_another_number_of_ranks_may_come() -> None:
    store = Memory()
    assert attempt(store, 4) != attempt(store, 2, late=0) != attempt(store, 3, late=0)


def test_a_leader_that_died_is_not_followed() -> None:
    """It had written its word, and nobody had come."""
    store = Memory()
    with pytest.raises(TimeoutError, match=r"not all of 2 ranks came within 0.1 s"):
        meet(store, 0, 2, timedelta(seconds=0.1))
    dead = store.data[LEADER]
    (found,) = attempt(store, 2, late=0)
    assert found != dead
    assert meet(store, 0, 1, LIMIT) != found
