"""Run as a program: how much memory the making of an engine takes. `write FILE` stores a model, `read FILE` builds it on
meta with those weights and prints the number of parameters, the bytes of the arenas, and by how many bytes the peak rose.
The peak is the kernel's own figure; that of getrusage would begin with the parent's."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from scrimp import zoo
from scrimp.engine import Engine, Memory

OVERRIDES = {"layers": 24}  # 209 M parameters


def peak_nbytes() -> int:
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def write(path: str) -> None:
    model = zoo.build("gpt-125m", **OVERRIDES)
    save_file(dict(model.named_parameters()), path)


def read(path: str) -> None:
    with torch.device("meta"):
        model = zoo.build("gpt-125m", **OVERRIDES)
    before = peak_nbytes()
    engine = Engine(model, weights=path, memory=Memory(device="4GiB"), device="cpu", precision="bf16")
    rise = peak_nbytes() - before
    print(sum(parameter.numel() for parameter in model.parameters()), engine.store.host_nbytes(), rise)


if __name__ == "__main__":
    {"write": write, "read": read}[sys.argv[1]](sys.argv[2])
