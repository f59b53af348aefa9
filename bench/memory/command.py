"""The memory that exchanging gradients takes, and whole steps: `make bench-memory`, or `python -m bench.memory [--small]`.

Every contender in a process of its own. Parts: "exchange", what each takes above weights and one momentum buffer; "step",
the peak of a training step; "batch", the largest batch in the memory that the DGC layout takes for one of 32. What is known for
this commit is not measured again. Rows are in bench/results/memory/COMMIT.json, tables in COMMIT.md beside it.
`python -m bench.memory.page` writes docs/results/raw/memory.md from the rows.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

import torch

from bench.gpu.command import row_of
from bench.gpu.results import RESULTS, Row, read_rows, same_machine, write_rows
from bench.gpu.watch import watched
from bench.machine import machine
from bench.memory.case import SMALL, Case
from bench.memory.contenders import CONTENDERS, DGC, SCRIMP
from bench.memory.page import key_of, summary, tables

Point = tuple[str, str, Case]  # part, contender, case

PARTS = ("exchange", "step", "batch")
# The same for everybody: or cuBLAS alone takes 32 MiB for every thread on such a GPU, whatever is measured.
ENVIRONMENT = {
    "CUBLAS_WORKSPACE_CONFIG": ":16:8",
    "CUBLASLT_WORKSPACE_SIZE": "128",
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
}


def main(arguments: Sequence[str] | None = None) -> int:
    args, here = _arguments(arguments), machine()
    args.results.mkdir(parents=True, exist_ok=True)
    rows = usable(read_rows([args.results]), args.commit, here)
    asked = points(args.part or PARTS, device=args.device, small=args.small, models=args.model)
    for wave in waves([point for point in asked if not args.contender or point[1] in args.contender]):
        new = [point for point in wave if key_of(*point) not in rows]
        with ThreadPoolExecutor(args.jobs) as pool:
            seen = pool.map(lambda point: measure(*point, rows, args.search_seconds, args.seconds), new)
            for (part, name, case), found in zip(new, seen, strict=True):
                about = {"part": part, "contender": name, "case": asdict(case), "commit": args.commit, "machine": here}
                rows[key_of(part, name, case)] = row = {**about, "when": datetime.now(UTC).isoformat(timespec="seconds"), **found}
                write_rows(args.results, args.commit, rows.values())
                print(f"{part}: {case.model_name} {case.precision}, {name}: {summary(row)}", flush=True)
    text = tables([*rows.values()])
    facts = "".join(f"- {name}: {value}\n" for name, value in {**here, "commit": args.commit}.items())
    (args.results / f"{args.commit}.md").write_text(f"# make bench-memory\n\n{facts}\n{text}")
    print(f"\n{text}")
    return int(any("failed" in row for row in rows.values()))


def points(parts: Sequence[str], *, device: str, small: bool, models: Sequence[str] | None = None) -> Iterator[Point]:
    if "exchange" in parts:
        for name in CONTENDERS:
            yield "exchange", name, Case(device=device, small=small)
    for part in (part for part in ("step", "batch") if part in parts):
        for model in models or SMALL:
            for precision in ("bf16", "fp32") if part == "step" else ("bf16",):
                for name in (DGC, SCRIMP):
                    yield part, name, Case(model_name=model, device=device, small=small, precision=precision, batch=32)


def waves(points: Sequence[Point]) -> list[list[Point]]:
    """Each knows from those before it what it needs, and none needs to know of another in the same one."""
    order = {("exchange", False): 0, ("step", False): 0, ("step", True): 1, ("batch", False): 1, ("batch", True): 2}
    return [[point for point in points if order[point[0], point[1] == SCRIMP] == wave] for wave in range(3)]


def measure(part: str, name: str, case: Case, rows: dict[str, Row], search_seconds: float, seconds: float) -> Row:
    given: dict[str, int | None] = {}
    if part == "batch" or name == SCRIMP:
        given["peak_nbytes"] = rows.get(key_of("step", DGC, case), {}).get("peak_nbytes")
    if part == "batch" and name == SCRIMP:
        given["batch"] = rows.get(key_of("batch", DGC, case), {}).get("batch")
    if None in given.values():
        return {"skipped": f"the rows of the {DGC} are missing, with which this one is compared"}
    command = [sys.executable, "-m", "bench.memory.run", part, name, json.dumps(asdict(case)), json.dumps(given)]
    row = row_of(watched([*command, str(search_seconds)], seconds=seconds, env={**os.environ, **ENVIRONMENT}))
    del row["host_nbytes"]  # of several processes at once
    return row


def usable(rows: Sequence[Row], commit: str, here: dict[str, str]) -> dict[str, Row]:
    """Those of this commit from such a machine; what was skipped or failed may be possible by now."""
    return {
        key_of(row["part"], row["contender"], Case(**row["case"])): row
        for row in rows
        if row["commit"] == commit != "unknown"
        and not commit.endswith("-changed")
        and same_machine(row, {"machine": here})
        and not {"skipped", "failed"} & {*row}
    }


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    commit = machine()["commit"].replace(", changed since", "-changed")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=PARTS, action="append", help="several may be given; without any, all")
    parser.add_argument("--contender", choices=[*CONTENDERS, SCRIMP], action="append", help="these alone")
    parser.add_argument("--model", choices=[*SMALL], action="append", help="of whole steps, these alone")
    parser.add_argument("--device", default=device)
    parser.add_argument("--small", action=argparse.BooleanOptionalAction, default=device == "cpu", help="small models")
    parser.add_argument("--jobs", type=int, default=4 if device == "cuda" else 1, help="contenders at once: bytes do not mind")
    parser.add_argument("--search-seconds", type=float, default=25, help="after so many a search begins no more trials")
    parser.add_argument("--seconds", type=float, default=120, help="at most, for one contender")
    parser.add_argument("--results", type=Path, default=RESULTS / "memory", help="the folder to write to")
    parser.add_argument("--commit", default=commit, help="what to call this code, where there is no git")
    return parser.parse_args(arguments)
