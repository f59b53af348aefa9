"""Training with all masters and states on disk, beside what the disk itself can do in the same run.

    python -m bench.disk [--folder FOLDER] [--blocks 8] [--dim 1024] [--steps 6] [--json FILE]

The disk's own rate is that of a plain loop over a file as large as the states: a few threads read a piece with direct I/O
and write it back, as an update must, and do nothing else. A step cannot be quicker than the states' bytes, read and
written, over that rate. The same model with its states on the host shows what computing takes.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple
from pathlib import Path
from typing import Any

import torch

from bench.machine import machine
from scrimp import zoo
from scrimp.chunks import AdamW
from scrimp.engine import Engine, Memory

PIECE, THREADS = 4 << 20, 4
STATE_NBYTES = 12  # of a parameter: master and two moments
WARM_UP = 3  # steps: the first ones trace
SEQ = 8


def disk_rate(folder: Path, nbytes: int) -> float:
    """Bytes per second, those read and those written, of a loop that reads and writes everything once."""
    count = max(THREADS, nbytes // PIECE)
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        os.posix_fallocate(file.fileno(), 0, count * PIECE)
        try:
            fd = os.open(f"/proc/self/fd/{file.fileno()}", os.O_RDWR | os.O_DIRECT)
        except OSError:
            raise SystemExit(f"{folder} has no direct I/O; give --folder one on a disk") from None
        pieces = [mmap.mmap(-1, PIECE) for _ in range(THREADS)]
        for piece in pieces:
            piece.write(os.urandom(PIECE))

        def loop(*, read: bool) -> float:
            places, lock = iter(range(0, count * PIECE, PIECE)), threading.Lock()

            def work(piece: mmap.mmap) -> None:
                while True:
                    with lock:
                        at = next(places, None)
                    if at is None:
                        return
                    if read:
                        assert os.preadv(fd, [piece], at) == PIECE
                    assert os.pwrite(fd, piece, at) == PIECE

            start = time.perf_counter()
            threads = [threading.Thread(target=work, args=(piece,)) for piece in pieces]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            return time.perf_counter() - start

        loop(read=False)  # space that was never written reads as zeros, without the disk
        seconds = loop(read=True)
        os.close(fd)
    return 2 * count * PIECE / seconds


@contextmanager
def engine_for(folder: Path | None, arguments: argparse.Namespace, **settings: Any) -> Iterator[Engine]:
    torch.manual_seed(0)
    model = zoo.build("gpt-tiny", layers=arguments.blocks, dim=arguments.dim, heads=8, seq=SEQ, vocab=512)
    numel = sum(parameter.numel() for parameter in model.parameters())
    block = max(sum(p.numel() for p in module.parameters()) for module in model.get_submodule("blocks").children())
    host: str | int = 2 * numel + STATE_NBYTES * block + (1 << 20) if folder is not None else "auto"
    memory = Memory(device="8GiB", host=host, disk=folder)
    engine = Engine(model, optimizer=AdamW(), memory=memory, device="cpu", activations="recompute,offload", **settings)
    engine._run.planning._on_device = (
        frozenset()
    )  # all homes stay where they are: there is no device here that they could move to
    yield engine
    engine.close()


def steps_per_second(engine: Engine, arguments: argparse.Namespace) -> float:
    """Of steps that follow each other, their updates included."""
    batch = zoo.example_batch("gpt-tiny", batch=1, step=0, seq=SEQ, vocab=512)
    for _ in range(WARM_UP):
        engine.step(*batch)
    engine._run.wait()
    start = time.perf_counter()
    for _ in range(arguments.steps):
        engine.step(*batch)
    engine._run.wait()
    return arguments.steps / (time.perf_counter() - start)


def update_rate(engine: Engine, arguments: argparse.Namespace) -> float:
    """Bytes per second, read and written, of updates that nothing else runs beside: the median."""
    batch = zoo.example_batch("gpt-tiny", batch=1, step=0, seq=SEQ, vocab=512)
    rates = []
    for _ in range(arguments.steps):
        engine.step(*batch)  # clipped: it ends when its updates have just begun
        before = astuple(engine._run.store.traffic)
        start = time.perf_counter()
        engine._run.wait()
        seconds = time.perf_counter() - start
        rates.append(sum(b - a for a, b in zip(before, astuple(engine._run.store.traffic), strict=True)) / seconds)
    return statistics.median(rates)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    folder = Path(arguments.folder)
    found: dict[str, Any] = {"machine": machine(), "blocks": arguments.blocks, "dim": arguments.dim, "runs": []}
    modes: dict[str, dict[str, Any]] = {"clipped": {"clip_norm": 1.0}, "unclipped": {"skip_nonfinite": False}}
    for mode, settings in modes.items():
        with engine_for(None, arguments, **settings) as engine:
            host = steps_per_second(engine, arguments)
        with engine_for(folder, arguments, **settings) as engine:
            nbytes = engine.ledger.disk.total_nbytes
            before = disk_rate(folder, nbytes)
            disk = steps_per_second(engine, arguments)
            update = update_rate(engine, arguments) if mode == "clipped" else None
            rate = statistics.mean([before, disk_rate(folder, nbytes)])
            terms = engine.bound().terms
        found["runs"].append(
            {
                "mode": mode,
                "states_nbytes": nbytes,
                "steps_per_second_on_host": host,
                "steps_per_second_on_disk": disk,
                "disk_nbytes_per_second": 2 * nbytes * disk,
                "plain_loop_nbytes_per_second": rate,
                "share_of_plain_loop": 2 * nbytes * disk / rate,
                "updates_alone_nbytes_per_second": update,
                "bound_seconds": terms,
            }
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--folder", default=tempfile.gettempdir())
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--dim", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--json")
    arguments = parser.parse_args()
    found = measure(arguments)
    for run in found["runs"]:
        print(
            f"{run['mode']:10} {run['states_nbytes'] / 2**30:.2f} GiB of states: "
            f"{run['steps_per_second_on_disk']:.3f} steps/s on disk, {run['steps_per_second_on_host']:.3f} on the host; "
            f"{run['disk_nbytes_per_second'] / 1e9:.2f} GB/s read and written, {run['share_of_plain_loop']:.0%} of the plain "
            f"loop's {run['plain_loop_nbytes_per_second'] / 1e9:.2f}"
        )
        update = run["updates_alone_nbytes_per_second"]
        if update is not None:
            share = update / run["plain_loop_nbytes_per_second"]
            print(f"           updates with nothing beside them: {update / 1e9:.2f} GB/s, {share:.0%} of the plain loop")
        print("           at least:", ", ".join(f"{name} {seconds:.3f} s" for name, seconds in run["bound_seconds"].items()))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(found, indent=1))
