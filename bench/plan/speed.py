"""How long planning takes: `make bench-plan`, or `python -m bench.plan.speed`.

From a module on meta to a plan, capture and search, with all that plans may do: keep, recompute, offload. "Gap": of the least
peak, to what no plan is below; of the seconds, to the best of the ways to split that were looked at.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bench.gpu.results import RESULTS
from bench.machine import machine
from scrimp import plan, zoo

# The model, its layers, the cluster, the mesh, the gap that is good enough, and the seconds that are asked for.
CASES: dict[str, tuple[str, int, str, str, float, float]] = {
    "Llama-3 8B on 8x16": ("llama-8b", 32, "128xA100-80", "x=8,y=16", 0.01, 30),
    "GPT-3 175B on 8x8x16": ("gpt-175b", 96, "1024xA100-80", "x=8,y=8,z=16", 0.05, 180),
    "GPT-3 175B on 8x8x16, gap 1 %": ("gpt-175b", 96, "1024xA100-80", "x=8,y=8,z=16", 0.01, 60),
    "its first 24 layers": ("gpt-175b", 24, "1024xA100-80", "x=8,y=8,z=16", 0.05, 180),
}


def row(title: str) -> dict[str, Any]:
    name, layers, cluster, mesh, gap, source = CASES[title]
    with torch.device("meta"):
        model = zoo.build(name, layers=layers)
    batch = zoo.example_batch(name, int(cluster.partition("x")[0]), layers=layers)
    start = time.perf_counter()
    found = plan(model, batch, cluster, mesh=mesh, gap=gap, time_limit=180)
    return {
        "case": title, "seconds": time.perf_counter() - start, "asked_seconds": source, "asked_gap": gap, "gap": found.gap,
        "seconds_gap": found.seconds_gap, "peak_nbytes": found.memory.peak_nbytes, "step_seconds": found.seconds,
    }  # fmt: skip


def table(rows: Sequence[dict[str, Any]]) -> str:
    lines = ["| planned | took s | asked s | gap | asked | gap of the seconds | peak GiB |", "|---|---|---|---|---|---|---|"]
    for each in rows:
        lines.append(
            f"| {each['case']} | {each['seconds']:.1f} | {each['asked_seconds']} | {each['gap']:.2%} | {each['asked_gap']:.0%} "
            f"| {each['seconds_gap']:.2%} | {each['peak_nbytes'] / 2**30:.2f} |"
        )
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS / "plan", help="the folder to write to")
    args = parser.parse_args(arguments)
    here, rows = machine(), []
    args.results.mkdir(parents=True, exist_ok=True)
    for title in CASES:
        rows.append(row(title))
        print(table(rows[-1:]).splitlines()[-1], flush=True)
    path = args.results / f"{here['commit'].partition(',')[0]}-speed.json"
    path.write_text(json.dumps({"machine": here, "rows": rows}, indent=1))
    path.with_suffix(".md").write_text("# How long planning takes\n\n" + table(rows))


if __name__ == "__main__":
    main()
