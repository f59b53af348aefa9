"""gpt.toml in Python: the same model, text, optimizer and schedule, for those who want the loop.

python examples/gpt.py                              one GPU, or the CPU
torchrun --nproc-per-node 2 examples/gpt.py         several: each rank takes its part of the batch
"""

from __future__ import annotations

import sys
from math import cos, pi
from pathlib import Path

import torch

import scrimp
from scrimp import zoo

STEPS, BATCH, SEQ, WARM_UP, LR = int(sys.argv[1]) if len(sys.argv) > 1 else 400, 8, 64, 10, 3e-3


def rate(step: int) -> float:
    """Rises over the warm-up, then falls to a tenth."""
    done = max(0, step - WARM_UP) / max(1, STEPS - WARM_UP)
    return LR * min(1.0, (step + 1) / WARM_UP) * (0.1 + 0.9 * (1 + cos(pi * done)) / 2)


def main() -> None:
    text = torch.frombuffer(bytearray((Path(__file__).parent / "text.txt").read_bytes()), dtype=torch.uint8).long()
    torch.manual_seed(0)
    with torch.device("meta"):  # the engine initialises the weights where they belong
        model = zoo.build("gpt-tiny", vocab=256, seq=SEQ, dim=128, heads=4, layers=4)
    optimizer = scrimp.AdamW([("*norm*", {"weight_decay": 0.0})], lr=rate)
    with scrimp.Engine(model, optimizer=optimizer, clip_norm=1.0) as engine:
        joined = torch.distributed.is_initialized()
        rank, world = (torch.distributed.get_rank(), torch.distributed.get_world_size()) if joined else (0, 1)
        with scrimp.Progress(engine, steps=STEPS) as progress:
            for step in range(STEPS):
                places = torch.randint(len(text) - SEQ, (BATCH,), generator=torch.Generator().manual_seed(step))
                rows = torch.stack([text[place : place + SEQ + 1] for place in places.tolist()]).chunk(world)[rank]
                progress.update(engine.step(rows[:, :-1], rows[:, 1:]), tokens=BATCH * SEQ)
    if joined:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
