"""Seconds of a step of a large GPT within a cap, with and without clipping: `python -m bench.gpu_steps [cap] [batch]`."""

from __future__ import annotations

import sys
import time
from functools import partial
from statistics import median

import torch

import scrimp
from scrimp import zoo

SHAPE = {"dim": 4096, "heads": 32, "layers": 32, "vocab": 50304, "seq": 1024}
STEPS = 5


def timed(engine: scrimp.Engine, batch: tuple[torch.Tensor, ...], label: str) -> None:
    """The interval between the ends of steps, when nothing is waited for."""
    for _ in range(2):
        engine.step(*batch)
    seconds = []
    for _ in range(STEPS):
        start = time.perf_counter()
        loss = engine.step(*batch)
        seconds.append(time.perf_counter() - start)
    torch.cuda.synchronize()
    print(f"{label}: median {median(seconds):.3f} s, from {min(seconds):.3f} to {max(seconds):.3f}, loss {float(loss):.4f}")
    print(engine.bound(), flush=True)


def main(cap: str = "24GiB", batch: str = "8") -> None:
    with torch.device("meta"):
        model = zoo.build("gpt-tiny", head_loss=partial(scrimp.chunked_cross_entropy, chunk=2048), **SHAPE)
    start = time.perf_counter()
    memory = scrimp.Memory(device=cap, host="118GiB")
    engine = scrimp.Engine(model, optimizer=scrimp.AdamW(lr=1e-7), memory=memory, recompute="all", clip_norm=1.0)
    print(f"built in {time.perf_counter() - start:.1f} s, {torch.get_num_threads()} threads", flush=True)
    data = zoo.example_batch("gpt-tiny", batch=int(batch), step=0, **SHAPE)
    for k in range(3):
        start = time.perf_counter()
        engine.step(*data)
        print(f"step {k}: {time.perf_counter() - start:.2f} s", flush=True)
    print(f"homes on the device: {sum(home.place == 'device' for home in engine.store.homes)}; {engine.ledger.peak}")
    timed(engine, data, "clipped")
    engine.clip_norm, engine.skip_nonfinite = None, False
    timed(engine, data, "not clipped")
    print(f"reserved {torch.cuda.max_memory_reserved() / 2**30:.2f} GiB of {cap}")


if __name__ == "__main__":
    main(*sys.argv[1:])
