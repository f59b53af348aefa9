"""Ranks of one attempt find each other in a store that has the keys of earlier attempts.

torchrun keeps its store when it starts the workers again, so a new rank may read the address of a dead one
(pytorch issue 135712), and its count of restarts differs between machines. So every rank draws a random word:

    rank 0    writes its word as the leader, waits for a hello of every rank below it, and returns all their words
    others    say hello to the leader, and follow if the leader returned their own word; if there is another leader, again

A dead leader never returns the word of a living rank. The leader's word is then the prefix of all keys of this attempt.
"""

from __future__ import annotations

import json
import secrets
import time
from datetime import timedelta
from typing import Protocol

LEADER = "scrimp/leader"
POLL_SECONDS = 0.02


class Store(Protocol):
    """What this needs of `torch.distributed.Store`."""

    def set(self, key: str, value: str, /) -> None: ...

    def get(self, key: str, /) -> bytes: ...

    def check(self, keys: list[str], /) -> bool: ...


def meet(store: Store, rank: int, world: int, limit: timedelta) -> str:
    """The prefix of this attempt; the same on all its ranks. Raises `TimeoutError` if they do not all come."""
    mine, deadline = secrets.token_hex(8), time.monotonic() + limit.total_seconds()
    if rank == 0:
        store.set(LEADER, mine)
    while True:
        leader = mine if rank == 0 else _read(store, LEADER)
        if leader is not None:
            if rank == 0:
                words = [mine, *(_read(store, _hello(leader, other)) for other in range(1, world))]
                if None not in words:
                    store.set(_go(leader), json.dumps(words))
                    return leader
            else:
                store.set(_hello(leader, rank), mine)
                words = json.loads(_read(store, _go(leader)) or "[]")
                if words[rank : rank + 1] == [mine]:
                    return leader
        if time.monotonic() > deadline:
            raise TimeoutError(f"not all of {world} ranks came within {limit.total_seconds():g} s")
        time.sleep(POLL_SECONDS)


def _read(store: Store, key: str) -> str | None:
    return bytes(store.get(key)).decode() if store.check([key]) else None


def _hello(leader: str, rank: int) -> str:
    return f"scrimp/{leader}/hello/{rank}"


def _go(leader: str) -> str:
    return f"scrimp/{leader}/go"
