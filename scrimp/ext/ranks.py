"""A pool of local gloo processes, spawned once and reused for many jobs: for the tests, the benchmarks and the demo.

    with RankPool(4) as ranks:
        sums = ranks.run("package.module:function", 1, 2, key="value")    # one result for each rank, in rank order

A job is a module-level function; it runs on every rank inside an initialised process group. Every rank imports the
main module of the program anew, so a script that makes a pool needs the usual `if __name__ == "__main__":`.

On Linux a server process imports torch and scrimp once and forks the ranks of all pools of the program; elsewhere every rank is
spawned and imports them itself, which takes 3 s of a core. A forked rank gets its pool's environment, working folder,
standard output and standard error. Only variables that a library reads while it is loaded keep the values that they
had when the program made its first pool.
"""

import atexit
import faulthandler
import importlib
import multiprocessing
import os
import pickle
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from functools import reduce
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess, SpawnProcess
from typing import Any, NoReturn, Self

from scrimp.ext._rank_start import adopt, open_outputs, rank_context

START_SECONDS = 120.0  # all ranks import torch at the same time, which is slow on few cores
CLOSE_SECONDS = 5.0
DUMP_SECONDS = 1.0


class RankFailure(RuntimeError):  # noqa: N818
    """Ranks raised or died. `failures`: rank -> traceback text, or how it died; in the order noticed, deaths first.

    `standing`: rank -> stack of a rank that did not reply in the grace time after another one died.
    """

    def __init__(self, job: str, world: int, failures: dict[int, str], standing: dict[int, str]) -> None:
        self.failures, self.standing = failures, standing
        ranks_of: dict[str, list[int]] = {}  # ranks often fail alike: show each text once
        for rank, text in failures.items():
            ranks_of.setdefault(text, []).append(rank)
        parts = [f"{job}: {len(failures)} of {world} ranks failed"]
        parts += [text if text.startswith("rank ") else f"{_name(ranks)}:\n{text}" for text, ranks in ranks_of.items()]
        parts += [f"rank {rank} did not reply, its stack:\n{stack}" for rank, stack in sorted(standing.items())]
        super().__init__("\n\n".join(parts))


class RankTimeout(RuntimeError):  # noqa: N818
    """Ranks did not reply in time. `standing`: rank -> stack of such a rank; `failures`: as in RankFailure."""

    def __init__(self, job: str, world: int, seconds: float, failures: dict[int, str], standing: dict[int, str]) -> None:
        self.failures, self.standing = failures, standing
        parts = [f"{job}: {len(standing)} of {world} ranks did not reply within {seconds:g} s"]
        for rank in range(world):
            if rank in standing:
                parts.append(f"stack of rank {rank}:\n{standing[rank]}")
            else:
                parts.append(f"rank {rank} failed:\n{failures[rank]}" if rank in failures else f"rank {rank} finished")
        super().__init__("\n\n".join(parts))


class RankPool:
    """`world` processes on gloo (or on NCCL, each on a GPU of its own as far as there are any), which run one job at a time.

    `timeout_seconds` bounds each job unless `run` overrides it. `collective_timeout_seconds` (by default the same) bounds each
    collective: make it the shorter one if ranks left alone in a collective are to raise on their own.
    """

    def __init__(
        self,
        world: int,
        *,
        timeout_seconds: float = 60.0,
        collective_timeout_seconds: float | None = None,
        backend: str = "gloo",
    ) -> None:
        if world < 1:
            raise ValueError(f"a pool needs at least 1 rank, not {world}")
        self.world = world
        self._timeout = timeout_seconds
        self._owner = os.getpid()
        self._ended = ""  # why the pool was closed
        self._folder = tempfile.mkdtemp(prefix="scrimp-ranks-")
        self._processes: list[SpawnProcess | ForkServerProcess] = []
        self._pipes: list[Connection] = []
        atexit.register(self.close)
        collective = timeout_seconds if collective_timeout_seconds is None else collective_timeout_seconds
        context = rank_context()
        outputs = open_outputs()
        try:
            for rank in range(world):
                ours, theirs = context.Pipe()
                self._pipes.append(ours)
                args = (rank, world, theirs, self._folder, collective, backend, dict(os.environ), outputs)
                process = context.Process(target=_serve, args=args, name=f"rank-{rank}", daemon=True)
                process.start()
                theirs.close()  # else the child's exit would not close the pipe
                self._processes.append(process)
            self._collect("start of the ranks", START_SECONDS, CLOSE_SECONDS, keep=False)
        except BaseException:
            self._end("it did not start", kill=True)
            raise
        finally:
            for output in outputs.values():
                output.close()

    @property
    def closed(self) -> bool:
        """Whether the pool rejects jobs; a copy of it in a forked process rejects them too."""
        return bool(self._ended) or self._owner != os.getpid()

    def run(
        self,
        target: str | Callable[..., Any],
        *args: Any,
        timeout_seconds: float | None = None,
        grace_seconds: float = 5.0,
        keep_after_failure: bool = False,
        **kwargs: Any,
    ) -> list[Any]:
        """Calls a module-level function on every rank, as fn(*args, **kwargs); returns the results in rank order.

        `target` is the function or "package.module:function". Raises RankFailure if a rank raised or died (after a death the
        others have `grace_seconds` to reply), and RankTimeout if a rank did not reply in time.

        Either one closes the pool, since the ranks may be out of step: one may have left a collective in which others still wait.
        With `keep_after_failure=True` the caller guarantees that the ranks are in step after a failure; then a RankFailure in
        which every rank has replied leaves the pool open. A death or a time-out always closes it.
        """
        if self.closed:
            raise RuntimeError(f"this pool of {self.world} ranks is closed: {self._ended or 'it belongs to another process'}")
        # Plain pickle, here and for results: the one of multiprocessing would pass tensors as handles to shared
        # memory, which end with the process that made them. Pickled first, so that an error leaves the ranks idle.
        job = pickle.dumps((target, args, kwargs))
        message = pickle.dumps(([entry or os.getcwd() for entry in sys.path], job))
        name = target if isinstance(target, str) else f"{target.__module__}:{target.__qualname__}"
        try:
            for pipe in self._pipes:
                with suppress(OSError):  # the rank is dead, which _collect reports
                    pipe.send_bytes(message)
            limit = self._timeout if timeout_seconds is None else timeout_seconds
            return self._collect(name, limit, grace_seconds, keep_after_failure)
        except (RankFailure, RankTimeout):
            raise
        except BaseException:
            self._end(f"{name} was interrupted", kill=True)  # the ranks may be busy, and would reply late
            raise

    def close(self) -> None:
        """Ends the ranks and removes their files; may be called again."""
        self._end("close() was called", kill=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _collect(self, job: str, seconds: float, grace: float, keep: bool) -> list[Any]:
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        died: set[int] = set()
        pending = set(range(self.world))
        deadline = time.monotonic() + seconds
        while pending and (left := deadline - time.monotonic()) > 0:
            sentinels = {self._processes[rank].sentinel for rank in pending}
            ready = set(wait([*sentinels, *(self._pipes[rank] for rank in pending)], left))
            # Dead ranks first: the errors of their peers are consequences.
            for rank in sorted(pending, key=lambda rank: (self._processes[rank].sentinel not in ready, rank)):
                pipe, process = self._pipes[rank], self._processes[rank]
                if pipe not in ready and process.sentinel not in ready:
                    continue
                pending.discard(rank)
                try:
                    # A process forked by a dead rank can hold its pipe open: do not wait for its end.
                    reply = pipe.recv_bytes() if pipe.poll() else b""
                except (EOFError, OSError):
                    reply = b""
                if reply[:1] == b"-":
                    failures[rank] = reply[1:].decode()
                elif reply:
                    try:
                        results[rank] = pickle.loads(memoryview(reply)[1:])
                    except Exception as error:
                        failures[rank] = "its result cannot be unpickled here:\n" + _brief(error)
                else:
                    process.join(DUMP_SECONDS)
                    died.add(rank)
                    crash = self._stack(rank)  # written after a segmentation fault or the like
                    failures[rank] = f"rank {rank} died with exit code {process.exitcode}" + (crash and f":\n{crash}")
                    deadline = min(deadline, time.monotonic() + grace)
        if not pending and not failures:
            return [results[rank] for rank in range(self.world)]
        standing = self._dump(pending) if pending else {}
        if pending or died or not keep:
            self._end(f"{job} failed", kill=True)
        if pending and not died:
            raise RankTimeout(job, self.world, seconds, failures, standing)
        raise RankFailure(job, self.world, failures, standing)

    def _dump(self, ranks: Iterable[int]) -> dict[int, str]:
        for process in self._processes:
            if process.is_alive() and process.pid:
                os.kill(process.pid, signal.SIGUSR1)
        time.sleep(DUMP_SECONDS)
        return {rank: self._stack(rank) or "  (no stack: it was starting, stopped or gone)" for rank in ranks}

    def _stack(self, rank: int) -> str:
        """faulthandler's output for a rank, without our own thread and without the frames below the job."""
        try:
            with open(_stack_file(self._folder, rank), errors="replace") as file:
                blocks = file.read().strip("\n").split("\n\n")
        except FileNotFoundError:
            return ""
        kept = []
        for block in blocks:
            if " in _watch_parent" in block or block.startswith("Extension modules:"):
                continue
            lines = block.split("\n")
            below = (i for i, line in enumerate(lines) if 'ranks.py", ' in line and line.endswith((" in _call", " in _reply")))
            kept.append("\n".join(lines[: next(below, None)]))
        return "\n\n".join(kept)

    def _end(self, why: str, kill: bool) -> None:
        if self.closed:
            return
        self._ended = why
        atexit.unregister(self.close)
        for pipe in self._pipes if not kill else ():
            with suppress(OSError):
                pipe.send_bytes(b"")
        deadline = time.monotonic() + (0 if kill else CLOSE_SECONDS)
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        for process in self._processes:
            process.kill()  # by its pid, and only while it is our child
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        shutil.rmtree(self._folder, ignore_errors=True)


_pools: dict[int, RankPool] = {}


def pool(world: int) -> RankPool:
    """This process's pool with so many ranks; makes one if there is none, or if the last one was closed."""
    if world not in _pools or _pools[world].closed:
        _pools[world] = RankPool(world)
    return _pools[world]


def close_pools() -> None:
    """Close every pool that `pool` made."""
    while _pools:
        _pools.popitem()[1].close()


def _name(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, sorted(ranks)))


def _brief(error: BaseException) -> str:
    """The traceback without the frames of this file that lead to the job, unless there are no others."""
    trace = error.__traceback__
    while trace and trace.tb_next and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    text = "".join(traceback.format_exception(type(error), error, trace))
    return text.split("\nException raised from ")[0].rstrip()  # torch may add a page of C++ frames


def _stack_file(folder: str, rank: int) -> str:
    return os.path.join(folder, f"stack-{rank}")


# The following functions run in the children.


def _serve(
    rank: int,
    world: int,
    pipe: Connection,
    folder: str,
    collective: float,
    backend: str,
    environment: dict[str, str],
    outputs: dict[int, Connection],
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the parent ends the ranks
    adopt(environment, outputs)
    stacks = open(_stack_file(folder, rank), "w")  # noqa: SIM115 - faulthandler writes to it until the end
    faulthandler.enable(stacks, all_threads=True)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    threading.Thread(target=_watch_parent, args=(folder,), daemon=True).start()
    _reply(pipe, _join, rank, world, folder, collective, backend)
    while True:
        try:
            message = pipe.recv_bytes()
        except (EOFError, OSError):
            _leave_orphaned(folder)
        if not message:
            break
        _reply(pipe, _call, message)
    import torch.distributed as dist

    dist.destroy_process_group()


def _join(rank: int, world: int, folder: str, collective: float, backend: str) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"  # before torch: ranks share the cores, and their threads would compete
    if "GLOO_SOCKET_IFNAME" not in os.environ and any(name == "lo" for _, name in socket.if_nameindex()):
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # the host name need not resolve to a local address
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)  # the main module may have imported torch already
    store = dist.FileStore(os.path.join(folder, "store"), world)  # type: ignore[attr-defined]
    # A barrier first, so that a short time-out for collectives need not cover the slowest import.
    store.set(f"up-{rank}", "1")
    store.wait([f"up-{other}" for other in range(world)], timedelta(seconds=START_SECONDS))
    limit = timedelta(seconds=collective)
    store.set_timeout(limit)
    if backend == "nccl":
        if torch.cuda.device_count() < world:
            # NCCL refuses two ranks of a host on one GPU; with host ids of their own they use the loopback.
            os.environ.update(NCCL_HOSTID=f"rank-{rank}", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
        torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=limit)


def _call(message: bytes) -> Any:
    path, job = pickle.loads(message)
    sys.path[:] = path  # first, since the job may need modules that only the parent's current path finds
    target, args, kwargs = pickle.loads(job)
    if isinstance(target, str):
        module, _, function = target.partition(":")
        target = reduce(getattr, function.split("."), importlib.import_module(module))
    return target(*args, **kwargs)


def _reply(pipe: Connection, work: Callable[..., Any], *args: Any) -> None:
    try:
        reply = b"+" + pickle.dumps(work(*args))
    except BaseException as error:  # sys.exit() in a job fails the job and does not end the rank
        reply = b"-" + _brief(error).encode(errors="replace")
    sys.stdout.flush()  # a rank may be killed later, and then its buffers are lost
    sys.stderr.flush()
    pipe.send_bytes(reply)


def _watch_parent(folder: str) -> None:
    """Ends this rank with the process that made the pool, or with the server that forked the rank."""
    maker, parent = multiprocessing.parent_process(), os.getppid()
    assert maker is not None
    while maker.is_alive() and os.getppid() == parent:
        time.sleep(0.5)
    _leave_orphaned(folder)


def _leave_orphaned(folder: str) -> NoReturn:
    shutil.rmtree(folder, ignore_errors=True)  # no other process is left to do it
    os._exit(1)
