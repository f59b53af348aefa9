"""Counts the bytes that moves of this process receive from other ranks."""

from __future__ import annotations

import threading

_lock = threading.Lock()
_total = [0]


def received_nbytes() -> int:
    """Bytes since the process began. For a program it is what its busiest rank receives."""
    return _total[0]


def count_received(nbytes: int) -> None:
    """Moves run in several threads: those of a sparse exchange overlap with those of a step."""
    with _lock:
        _total[0] += nbytes
