"""Captured graphs as files of the user's cache, one for each key.

A file has a line with its key and the hash of what follows, then the graph's JSON. A file that is not so, from another version or
cut short, counts as missing. A rename puts a file in place, so several processes may write at once. The least recently used
files are removed when they become too many. Nothing here fails: without a cache a start takes longer.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from contextlib import suppress
from pathlib import Path

from scrimp._cache import cache_folder
from scrimp.capture.graph.graph import Graph
from scrimp.capture.graph.json import from_json, to_json

SWITCH = "SCRIMP_GRAPHS"  # the environment variable: 0 turns the cache off
MOST_FILES, MOST_NBYTES = 64, 256 << 20
PREFIX, SUFFIX, OLD_SECONDS = "graph-", ".json", 3600.0


def enabled() -> bool:
    return os.environ.get(SWITCH) != "0"


def load_graph(key: str) -> Graph | None:
    """None if there is none, or none that can be read."""
    if not enabled():
        return None
    with suppress(OSError, RuntimeError):
        path = _path(key)
        head, _, text = path.read_bytes().partition(b"\n")
        if head != _head(key, text):
            return None
        with suppress(OSError):
            os.utime(path)  # used just now
        with suppress(Exception):  # of another version: any difference may show anywhere
            return from_json(text.decode())
    return None


def save_graph(key: str, graph: Graph) -> None:
    if not enabled():
        return
    with suppress(OSError, RuntimeError):
        path = _path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        text = to_json(graph).encode()
        handle, fresh = tempfile.mkstemp(dir=path.parent, prefix=PREFIX, suffix=".new")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(_head(key, text) + b"\n" + text)
            os.replace(fresh, path)
        finally:
            Path(fresh).unlink(missing_ok=True)
        _remove_old(path)


def _path(key: str) -> Path:
    return cache_folder() / f"{PREFIX}{key}{SUFFIX}"


def _head(key: str, text: bytes) -> bytes:
    return f"{key} {hashlib.sha256(text).hexdigest()}".encode()


def _remove_old(newest: Path) -> None:
    """Keeps the most recently used files, and removes what a process that was killed left behind."""
    found = []
    for path in newest.parent.glob(f"{PREFIX}*"):
        with suppress(OSError):
            found.append((path.stat().st_mtime, path.stat().st_size, path))
    found.sort(key=lambda each: (each[2] == newest, each[0]), reverse=True)
    latest, count, nbytes = max((each[0] for each in found), default=0.0), 0, 0
    for at, size, path in found:
        if path.suffix == SUFFIX:
            count, nbytes = count + 1, nbytes + size
        left = path.suffix != SUFFIX and at < latest - OLD_SECONDS
        if left or (path.suffix == SUFFIX and path != newest and (count > MOST_FILES or nbytes > MOST_NBYTES)):
            with suppress(OSError):
                path.unlink()
