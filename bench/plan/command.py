"""Plans beside known parallelisms, in one memory model: `make bench-plan`, or `python -m bench.plan [--model gpt-6b7]`.

For every model and number of devices: scrimp's plan of the least memory, and the fastest within a tenth of it; Megatron-LM's
tensor parallelism with and without sequence splitting and its distributed optimizer; data parallelism and ZeRO. All count 18
bytes a parameter, and keep what is saved; those named "full" run forwards again, and scrimp's last plan may do so too, and send
to the host. Peaks and seconds are predictions, for the cluster that is named. "Floor": every byte of that moment once, over all
devices. Rows are in bench/results/plan/COMMIT.json, tables beside.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.gpu.results import RESULTS
from bench.machine import machine
from scrimp import Cluster, Mesh, PlanError, zoo
from scrimp.planner import (
    BASELINES,
    DATA,
    KEEP,
    TENSOR,
    Assembly,
    Drawn,
    Layers,
    OnMesh,
    Solution,
    captured,
    memory_of,
    precision_of,
    solve,
)

ALL, FEW = (8, 4, 2, 1), (8, 1)  # sizes of the tensor-parallel axis
SIZES = {
    "gpt-2b7": {8: ALL, 32: ALL},
    "gpt-6b7": {8: ALL, 32: ALL},
    "gpt-13b": {8: ALL, 32: ALL},
    "gpt-175b": {512: FEW, 1024: FEW},
    "llama-8b": {8: FEW, 128: FEW},
    "llama-70b": {64: FEW, 512: FEW},
}
VOCAB = {"gpt": 50304, "llama": 128256}
LEAST, NEAR, FREE = "scrimp, least memory", "scrimp, within a tenth", "scrimp, recomputing or offloading"


def rows(name: str, devices: int, seconds: float) -> Iterator[dict[str, Any]]:
    """One sequence a device."""
    precision = precision_of("megatron-bf16", "adamw")
    assert precision is not None
    vocab = VOCAB[name.partition("-")[0]]
    with torch.device("meta"):
        model = zoo.build(name, vocab=vocab)
    start = time.perf_counter()
    graph = captured(model, zoo.example_batch(name, devices, vocab=vocab), precision)
    took = time.perf_counter() - start
    cluster = Cluster.preset(f"{devices}xA100-80")
    layers = Layers(graph)
    drawn = Drawn(graph, cluster, precision, "adamw")
    for tp in SIZES[name].get(devices, FEW):
        mesh = Mesh({"dp": devices // tp, "tp": tp})
        start = time.perf_counter()
        on = OnMesh(layers, cluster, mesh)
        assembly = on.assembly(precision, (KEEP,))
        problem = assembly.sketch.problem()
        about = {
            "model": name,
            "devices": devices,
            "mesh": str(mesh),
            "capture_s": took,
            "assemble_s": time.perf_counter() - start,
        }
        free = on.assembly(precision)
        every = [
            (LEAST, solve(problem, seconds=seconds), assembly),
            (NEAR, solve(problem, seconds=seconds, slack=0.1), assembly),
            (FREE, solve(free.sketch.problem(), seconds=seconds), free),
            *known(drawn, mesh, seconds),
        ]
        for contender, found, by in every:
            memory = memory_of(by, found)
            yield {
                **about,
                "contender": contender,
                "peak_nbytes": found.peak_nbytes,
                "floor_nbytes": memory.floor_nbytes,
                "kinds": {kind.kind: kind.nbytes for kind in memory.kinds},
                "redundant": {kind.kind: kind.redundant_nbytes for kind in memory.kinds},
                "seconds": found.seconds,
                "gap": found.gap,
                "solve_s": found.spent_seconds,
            }


def known(drawn: Drawn, mesh: Mesh, seconds: float) -> Iterator[tuple[str, Solution, Assembly]]:
    """Attention is fused: there is nothing that selective recompute could make again."""
    names = [name for name in (DATA if mesh.axis_size("tp") == 1 else TENSOR) if not name.endswith("selective")]
    for name in names:
        try:
            found = drawn.plan(BASELINES[name](mesh), mesh, seconds)
            yield name, found.source.solution, found.source.assembly
        except PlanError as error:
            print(f"{name} on {mesh}: {error}", flush=True)


def table(found: Sequence[dict[str, Any]]) -> str:
    least = {name: min(row["peak_nbytes"] for row in found if row["contender"] == name) for name in (LEAST, FREE)}
    lines = [
        f"{found[0]['model']}, {found[0]['devices']} devices, a sequence each:",
        "",
        "| plan | mesh | peak GiB | least is lower by | free by | above its floor | step s | gap | capture, draw up, solve s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in found:
        lines.append(
            f"| {row['contender']} | {row['mesh']} | {row['peak_nbytes'] / 2**30:.2f} "
            f"| {1 - least[LEAST] / row['peak_nbytes']:.1%} | {1 - least[FREE] / row['peak_nbytes']:.1%} "
            f"| {row['peak_nbytes'] / row['floor_nbytes'] - 1:.1%} | {row['seconds']:.3f} | {row['gap']:.2%} "
            f"| {row['capture_s']:.1f}, {row['assemble_s']:.1f}, {row['solve_s']:.1f} |"
        )
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=[*SIZES], action="append", help="these alone")
    parser.add_argument("--devices", type=int, action="append", help="these alone")
    parser.add_argument("--seconds", type=float, default=60, help="for one solution, at most")
    parser.add_argument("--results", type=Path, default=RESULTS / "plan", help="the folder to write to")
    args = parser.parse_args(arguments)
    here = machine()
    args.results.mkdir(parents=True, exist_ok=True)
    path = args.results / f"{here['commit'].partition(',')[0]}.json"
    every, pages = [], []
    for name in args.model or SIZES:
        for devices in args.devices or SIZES[name]:
            found = [*rows(name, devices, args.seconds)]
            every += found
            pages.append(table(found))
            print(pages[-1], flush=True)
            path.write_text(json.dumps({"machine": here, "rows": every}, indent=1))
            path.with_suffix(".md").write_text("# make bench-plan\n\n" + "\n".join(pages))
