"""Training within a cap, side by side: `make bench-gpu`, or `python -m bench.gpu --section NAME [--device cpu]`.

Every contender runs in a process of its own, one after the other, so that each has the machine to itself; a section's
contenders are run in turns. Results are kept under bench/results/, and what is there for this commit is not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from bench.gpu_contenders import CONTENDERS, Case, available
from bench.machine import machine
from scrimp.ledger import format_nbytes

RESULTS = Path(__file__).parent / "results"
LARGE: dict[str, Any] = {"layers": 32, "dim": 4096, "batch": 8}
SMALL: dict[str, Any] = {"layers": 2, "dim": 256, "batch": 2, "seq": 64, "vocab": 512, "cap": "1GiB"}
SECTIONS: dict[str, list[Case]] = {
    "24GiB": [Case(**LARGE, cap="24GiB"), Case(**LARGE, cap="24GiB", clip=True)],
    "80GiB": [Case(**LARGE, cap="80GiB"), Case(**LARGE, cap="80GiB", clip=True)],
    "12GiB": [Case(layers=32, dim=2560, batch=8, cap="12GiB")],
    "batch-32": [Case(**{**LARGE, "batch": 32}, cap="80GiB")],
    "all-fits": [Case(layers=24, dim=2048, batch=8, cap="139GiB")],
    "tiny": [Case(**SMALL), Case(**SMALL, clip=True)],  # to try this out, without a GPU too
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--section", choices=[*SECTIONS], action="append")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=int, default=150, help="at most, for one contender")
    args = parser.parse_args()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip() or "unknown"
    for section in args.section or [name for name in SECTIONS if name != "tiny"]:
        path = RESULTS / f"{section}-{commit}.json"
        found = json.loads(path.read_text())["rows"] if path.exists() else {}
        for case in SECTIONS[section]:
            case = Case(**{**asdict(case), "device": args.device})
            for name in CONTENDERS:
                key = f"{name} | {json.dumps(asdict(case))}"
                if key not in found:
                    found[key] = one(name, case, args.seconds)
                    RESULTS.mkdir(exist_ok=True)
                    path.write_text(json.dumps({"machine": machine(), "commit": commit, "rows": found}, indent=1))
        print(table(section, found), flush=True)
        path.with_suffix(".md").write_text(table(section, found))


def one(name: str, case: Case, seconds: int) -> dict[str, object]:
    if not available(name):
        return {"failed": "not installed"}
    command = [sys.executable, "-m", "bench.gpu_run", name, json.dumps(asdict(case))]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, env=dict(os.environ))
    except subprocess.TimeoutExpired:
        return {"failed": f"not done in {seconds} s"}
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["killed"])[-1]
        return {"failed": "out of memory" if "out of memory" in done.stderr.lower() else last[:200]}
    result: dict[str, object] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def table(section: str, rows: dict[str, dict[str, object]]) -> str:
    """One table for each point, times beside scrimp's."""
    lines = [f"## {section}", ""]
    for case in dict.fromkeys(key.split(" | ", 1)[1] for key in rows):
        here = {key.split(" | ", 1)[0]: row for key, row in rows.items() if key.split(" | ", 1)[1] == case}
        point = Case(**json.loads(case))
        lines += [
            f"{point.layers} layers of {point.dim}, batch {point.batch}, cap {point.cap}{', clipped' if point.clip else ''}:",
            "",
            "| contender | s/step | spread | times scrimp's | GPU reserved | host peak | last loss |",
            "|---|---|---|---|---|---|---|",
        ]
        base = here.get("scrimp", {}).get("median_s")
        for name, row in here.items():
            if "failed" in row:
                lines.append(f"| {name} | {row['failed']} | | | | | |")
                continue
            ratio = f"{float(row['median_s']) / float(base):.2f}" if base else ""  # type: ignore[arg-type]
            lines.append(
                f"| {name} | {row['median_s']:.3f} | {row['least_s']:.3f} to {row['most_s']:.3f} | {ratio} | "
                f"{format_nbytes(int(str(row['reserved_nbytes'])))} | {format_nbytes(int(str(row['host_nbytes'])))} | "
                f"{row['losses'][-1]:.4f} |"  # type: ignore[index]
            )
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
