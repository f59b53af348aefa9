"""How long it takes to plan a large model and to rehearse a rank of the plan: `make bench-rehearse`, or `python -m
bench.rehearse [--only 175b]`.

Each case runs in its own process: from a module on meta to a plan, then rank 0 on meta, which runs every operator and move of a
step without memory. "Of the plan": the rehearsed peak over the plan's. "Resident": of the process, at most. Rows are in
bench/results/rehearse/COMMIT.json, a table beside.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from bench.gpu.results import RESULTS
from bench.machine import machine
from bench.svg import Series, plot
from scrimp import PlanWarning, plan, rehearse, zoo


@dataclass(frozen=True, kw_only=True)
class Case:
    """`settings` of the model; one sequence a device."""

    title: str
    model: str
    devices: int
    kind: str
    mesh: str
    settings: tuple[tuple[str, int], ...] = ()
    seconds: float = 60.0  # limit of the search
    gap: float = 0.05


GPT = (("vocab", 50304),)  # 50257, padded as Megatron-LM does
CASES = (
    Case(title="GPT-3 175B", model="gpt-175b", devices=1024, kind="A100-80", mesh="x=8,y=8,z=16", settings=GPT),
    Case(title="Llama-3 405B", model="llama-405b", devices=2048, kind="H100", mesh="x=8,y=16,z=16"),
    Case(title="GPT-3 175B", model="gpt-175b", devices=10240, kind="H100", mesh="x=8,y=8,z=160", settings=GPT),
)
GROWTH = (
    *(
        Case(title="GPT-3 175B, 24 layers", model="gpt-175b", devices=count, kind="A100-80", mesh=mesh,
             settings=(*GPT, ("layers", 24)))
        for count, mesh in ((64, "x=8,y=8"), (256, "x=8,y=8,z=4"), (1024, "x=8,y=8,z=16"), (4096, "x=8,y=8,z=64"))
    ),
    *(
        Case(title=f"GPT-3 175B, {layers} layers", model="gpt-175b", devices=1024, kind="A100-80", mesh="x=8,y=8,z=16",
             settings=(*GPT, ("layers", layers)))
        for layers in (12, 48)
    ),
)  # fmt: skip


def row(case: Case) -> dict[str, Any]:
    warnings.simplefilter("ignore", PlanWarning)
    settings = dict(case.settings)
    start = time.perf_counter()
    with torch.device("meta"):
        model = zoo.build(case.model, **settings)
    batch = zoo.example_on_meta(case.model, case.devices, **settings)
    found = plan(
        model, batch, f"{case.devices}x{case.kind}", mesh=case.mesh, gap=case.gap, time_limit=case.seconds
    )  # fmt: skip
    middle = time.perf_counter()
    result = rehearse(found, model, batch)
    return {
        **asdict(case), "plan_seconds": middle - start, "rehearse_seconds": time.perf_counter() - middle, "gap_found": found.gap,
        "planned_nbytes": found.memory.peak_nbytes, "peak_nbytes": result.peak.nbytes, "where": result.peak.where,
        "points": len(result.points), "communication_seconds": result.communication_seconds,
        "step_seconds": result.step_seconds, "resident_nbytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    }  # fmt: skip


def table(rows: Sequence[dict[str, Any]]) -> str:
    lines = [
        "| model | devices | mesh | plan s | rehearse s | resident GiB | peak GiB | of the plan | points |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for each in rows:
        lines.append(
            f"| {each['title']} | {each['devices']:,} {each['kind']} | {each['mesh']} | {each['plan_seconds']:.1f} "
            f"| {each['rehearse_seconds']:.1f} | {each['resident_nbytes'] / 2**30:.2f} | {each['peak_nbytes'] / 2**30:.2f} "
            f"| {each['peak_nbytes'] / each['planned_nbytes']:.4f} | {each['points']:,} |"
        )
    return "\n".join(lines) + "\n"


def plots(rows: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Seconds by devices and by depth, each with the other fixed."""
    found = {}
    for name, by, fixed, value in (("rehearse-devices", "devices", "layers", 24), ("rehearse-depth", "layers", "devices", 1024)):
        chosen = [{**each, **dict(each["settings"])} for each in rows]
        chosen = sorted((each for each in chosen if "layers" in each and each[fixed] == value), key=lambda each: int(each[by]))
        if len(chosen) > 1:
            series = [
                Series(name=what, points=[(each[by], each[f"{what}_seconds"]) for each in chosen], colour=k)
                for k, what in enumerate(("plan", "rehearse"))
            ]
            found[name] = plot(f"GPT-3 175B, {value:,} {fixed}, on 2 cores", by, "seconds", series)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS / "rehearse", help="the folder to write to")
    parser.add_argument("--only", default="", help="cases whose model has this in its name")
    parser.add_argument("--growth", action="store_true", help="also other numbers of devices and layers")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)  # the number of a case: prints its row as JSON
    args = parser.parse_args(arguments)
    cases = (*CASES, *(GROWTH if args.growth or args.one is not None else ()))
    if args.one is not None:
        print(json.dumps(row(cases[args.one])))
        return
    here, rows = machine(), []
    args.results.mkdir(parents=True, exist_ok=True)
    for number, case in enumerate(cases):
        if args.only in case.model:
            command = [sys.executable, "-m", "bench.rehearse", "--one", str(number)]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            rows.append(json.loads(done.stdout.splitlines()[-1]))
            print(table(rows[-1:]).splitlines()[-1], flush=True)
    path = args.results / f"{here['commit'].partition(',')[0]}.json"
    path.write_text(json.dumps({"machine": here, "rows": rows}, indent=1))
    path.with_suffix(".md").write_text("# Plans and rehearsals of large models\n\n" + table(rows))
    for name, text in plots(rows).items():
        (args.results / f"{name}.svg").write_text(text)


if __name__ == "__main__":
    main()
