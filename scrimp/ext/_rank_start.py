"""Starts a rank's process: forked from a server that has imported torch, or spawned where forking is unsafe."""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, SpawnContext

# torch._dynamo: torch's checkpoint and DistributedDataParallel import it when they are first used.
PRELOADED = ["torch", "torch.distributed.tensor", "torch._dynamo", "scrimp.engine", "scrimp.exchange", "scrimp.move"]


def rank_context() -> ForkServerContext | SpawnContext:
    """The multiprocessing context, with its server running if it has one."""
    if sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with _one_thread():  # forking a process with threads is unsafe, and numpy starts one for each core
        forkserver.ensure_running()
    return context


@contextmanager
def _one_thread() -> Iterator[None]:
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before


def open_outputs() -> dict[int, Connection]:
    """Standard output and error, as far as they are open, in a form that can be sent to a rank."""
    found = {}
    for number in (1, 2):
        with suppress(OSError):
            found[number] = Connection(os.dup(number), readable=False)
    return found


def adopt(environment: dict[str, str], outputs: dict[int, Connection]) -> None:
    """In the new process: sets the environment and outputs of its pool; a fork server has those of the program's first pool."""
    os.environ.clear()
    os.environ.update(environment)
    for number, output in outputs.items():
        os.dup2(output.fileno(), number)
        output.close()
    gc.freeze()  # keep the server's imports out of garbage collection, which would write to pages shared by ranks
