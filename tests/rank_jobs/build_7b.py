"""A model of about 7 billion parameters, built on meta into the engine, and one step: host memory must stay at 14 bytes
per parameter and 2 GiB. `python -m tests.rank_jobs.build_7b`; exit status 1 if it does not."""

from __future__ import annotations

import sys
import time
from functools import partial

import torch

import scrimp
from bench.machine import high_water_nbytes
from scrimp import zoo

SHAPE = {"dim": 4096, "heads": 32, "layers": 32, "vocab": 50304, "seq": 1024}


def main(cap: str = "24GiB") -> int:
    torch.cuda.init()
    torch.zeros(1, device="cuda")
    before = high_water_nbytes()
    with torch.device("meta"):
        model = zoo.build("gpt-tiny", head_loss=partial(scrimp.chunked_cross_entropy, chunk=2048), **SHAPE)
    count = sum(p.numel() for p in model.parameters())
    start = time.perf_counter()
    engine = scrimp.Engine(
        model, optimizer=scrimp.AdamW(lr=1e-7), memory=scrimp.Memory(device=cap, host="118GiB"), activations="recompute,offload"
    )
    torch.cuda.synchronize()
    built = time.perf_counter() - start
    after_build = high_water_nbytes()
    batch = zoo.example_batch("gpt-tiny", batch=8, step=0, **SHAPE)
    losses = []
    for _ in range(3):
        start = time.perf_counter()
        losses.append(float(engine.step(*batch)))
        print(f"loss {losses[-1]:.4f}, {time.perf_counter() - start:.2f} s, peak {engine.ledger.peak}", flush=True)
    used, room = high_water_nbytes() - before, 14 * count + (2 << 30)
    reserved = torch.cuda.max_memory_reserved()
    print(f"{count / 1e9:.2f}B parameters built in {built:.1f} s, host {(after_build - before) / 2**30:.1f} GiB after building")
    print(f"host after 3 steps {used / 2**30:.1f} GiB, 14 B/param + 2 GiB is {room / 2**30:.1f} GiB")
    placements = sum(placement.tier == "device" for placement in engine._run.store.placements)
    print(f"reserved {reserved / 2**30:.2f} GiB of {cap}; homes on the device {placements}; {torch.get_num_threads()} threads")
    print(engine.bound())
    return int(used > room or reserved > engine._run.budget.device_nbytes or losses[-1] >= losses[0])


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
