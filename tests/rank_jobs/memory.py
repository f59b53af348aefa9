"""Run as a program: how much memory the making of an engine takes. `write FILE` stores a model, `read FILE` builds it on
meta with those weights and prints the number of parameters, the bytes of the arenas, and by how many bytes the peak rose.
The peak is the kernel's own figure; that of getrusage would begin with the parent's."""

from __future__ import annotations

import sys

import torch
from safetensors.torch import save_file

from bench.machine import high_water_nbytes
from scrimp import zoo
from scrimp.engine import Engine, Memory

OVERRIDES = {"layers": 24}  # 209 M parameters


def write(path: str) -> None:
    model = zoo.build("gpt-125m", **OVERRIDES)
    save_file(dict(model.named_parameters()), path)


def read(path: str) -> None:
    with torch.device("meta"):
        model = zoo.build("gpt-125m", **OVERRIDES)
    before = high_water_nbytes()
    engine = Engine(model, weights=path, memory=Memory(device="4GiB"), device="cpu", precision="bf16")
    rise = high_water_nbytes() - before
    print(sum(parameter.numel() for parameter in model.parameters()), engine._run.store.host_nbytes(), rise)


if __name__ == "__main__":
    {"write": write, "read": read}[sys.argv[1]](sys.argv[2])
