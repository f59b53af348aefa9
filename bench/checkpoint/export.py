"""What an export takes: resident memory above what is at rest, while an engine's weights are written to a file.

python -m bench.checkpoint.export [--blocks 18] [--dim 2048] [--vocab 64000] [--folder FOLDER] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch

from bench.machine import machine
from scrimp import SGD, Engine, zoo
from scrimp.ext import hf


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def measure(settings: dict[str, Any], folder: Path) -> dict[str, Any]:
    with torch.device("meta"):
        model = zoo.build("gpt-tiny", **settings)
    numel = sum(parameter.numel() for parameter in model.parameters())
    engine = Engine(model, memory="1GiB", optimizer=SGD(lr=0.1, momentum=0), device="cpu")
    over, before = threading.Event(), resident()
    most = before

    def watch() -> None:
        nonlocal most
        while not over.is_set():
            most = max(most, resident())
            time.sleep(0.002)

    thread = threading.Thread(target=watch)
    thread.start()
    start = time.perf_counter()
    hf.export(engine, folder / "all.safetensors")
    seconds = time.perf_counter() - start
    over.set()
    thread.join()
    engine.close()
    return {"parameters": numel, "at_rest_nbytes": before, "more_nbytes": most - before, "seconds": seconds}


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--blocks", type=int, default=18)
    parser.add_argument("--dim", type=int, default=2048)
    parser.add_argument("--vocab", type=int, default=64000)
    parser.add_argument("--folder", help="Where the file goes. Default: a temporary folder.")
    parser.add_argument("--json")
    arguments = parser.parse_args(given)
    settings = {"layers": arguments.blocks, "dim": arguments.dim, "heads": 16, "seq": 16, "vocab": arguments.vocab}
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        found = {"machine": machine(), **measure(settings, Path(folder))}
    more, rest = (found[key] / 2**20 for key in ("more_nbytes", "at_rest_nbytes"))
    print(
        f"{found['parameters'] / 1e6:.0f}M parameters exported in bf16 in {found['seconds']:.1f} s: "
        f"{more:.0f} MiB resident above the {rest:.0f} MiB at rest"
    )
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
