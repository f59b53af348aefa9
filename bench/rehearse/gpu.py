"""Rank 0 of plans for 32 devices, for real on one GPU: the allocator's peak against the plan's, seconds of compute against the
predicted ones.

    python -m bench.rehearse.gpu --plans FOLDER            makes the plans that are not there, on any machine
    python -m bench.rehearse.gpu --plans FOLDER --run      rehearses them on this machine's GPU

One sequence of 2,048 tokens a device. "Before": seconds by published figures; "after": by the operators that were measured on
this GPU (`scrimp probe --operators`), in the same run. Rows are in bench/results/rehearse/COMMIT-gpu.json, tables beside.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bench.gpu.results import RESULTS
from bench.machine import machine
from bench.rehearse.command import GPT
from bench.svg import Series, plot
from scrimp import Cluster, Plan, PlanWarning, plan, rehearse, zoo
from scrimp.engine import probe_operators
from scrimp.planner import baseline_plan
from scrimp.rehearsal import Rehearsal

DEVICES, CLUSTER, MESH, FLAT = 32, "32xH200", "dp=4,tp=8", "dp=32"
MODELS: dict[str, dict[str, int]] = {
    "gpt-6b7": dict(GPT), "gpt-13b": dict(GPT), "llama-8b": {"seq": 2048},
}  # fmt: skip
LEAST, KEEP, TP = "least memory", "keep-only", "tp"
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    LEAST: (MESH, {}),
    KEEP: (MESH, {"activations": "keep"}),
    **{name: (MESH, {}) for name in (TP, "tp-sp", "tp-sp-dist-opt")},
    "zero-3": (FLAT, {}),
}
FAR = 0.10  # plans whose compute seconds differ by more are ordered


@dataclass(frozen=True)
class Case:
    model: str
    way: str

    def file(self, folder: Path) -> Path:
        return folder / f"{self.model} {self.way}.json".replace(" ", "-")

    def built(self) -> tuple[nn.Module, Any]:
        settings = MODELS[self.model]
        with torch.device("meta"):
            model = zoo.build(self.model, **settings)
        return model, zoo.example_batch(self.model, DEVICES, **settings)

    def planned(self, seconds: float) -> Plan:
        (mesh, settings), (model, batch) = WAYS[self.way], self.built()
        if self.way in (LEAST, KEEP):
            return plan(model, batch, CLUSTER, mesh=mesh, time_limit=seconds, **settings)
        return baseline_plan(model, batch, CLUSTER, self.way, mesh=mesh, precision="bf16", seconds=seconds)


CASES = tuple(Case(model, way) for model in MODELS for way in WAYS)


def make(folder: Path, seconds: float) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for case in CASES:
        if not case.file(folder).exists():
            made = case.planned(seconds)
            made.save(case.file(folder))
            print(f"{case.file(folder)}: peak {made.memory.peak_nbytes / 2**30:.2f} GiB, {made.seconds:.3f} s", flush=True)


def row(case: Case, made: Plan, measured: Cluster) -> dict[str, Any]:
    model, batch = case.built()
    begin = time.perf_counter()
    after = rehearse(replace(made, cluster=measured.to_json()), model, batch, on="cuda")
    middle = time.perf_counter()
    before = rehearse(made, model, batch, on="meta")
    return {
        **asdict(case), "mesh": str(made.mesh), "planned_nbytes": made.memory.peak_nbytes,
        "meta_nbytes": before.peak.nbytes, **asdict(after.device_memory),
        "compute_seconds": after.compute_seconds, "before_seconds": before.predicted_seconds,
        "after_seconds": after.predicted_seconds, "layers": _rows(before, after, "layers"),
        "operators": _rows(before, after, "operators"), "rehearse_seconds": middle - begin,
        "meta_seconds": time.perf_counter() - middle,
    }  # fmt: skip


def _rows(before: Rehearsal, after: Rehearsal, what: str) -> list[dict[str, Any]]:
    predicted = {each.name: each.predicted_seconds for each in getattr(before, what)}
    return [
        {"name": each.name, "times": each.times, "measured": each.measured_seconds, "before": predicted[each.name],
         "after": each.predicted_seconds}
        for each in getattr(after, what)
    ]  # fmt: skip


def run(folder: Path, cases: Iterable[Case], results: Path) -> None:
    """Writes the results after each case."""
    here, begin = machine(), time.perf_counter()
    rates = probe_operators("cuda")
    took = time.perf_counter() - begin
    measured = Cluster.preset(CLUSTER).with_operators(rates)
    (results / "cluster-gpu.json").write_text(measured.to_json())
    print(f"operators measured in {took:.1f} s", flush=True)
    path = results / f"{here['commit'].partition(',')[0]}-gpu.json"
    rows: list[dict[str, Any]] = []
    found = {"machine": here, "probe_seconds": took, "operators": rates.to_data(), "rows": rows}
    for case in cases:
        rows.append(row(case, Plan.load(case.file(folder)), measured))
        print(memory_table(rows[-1:]).splitlines()[-1], f"{rows[-1]['rehearse_seconds']:.0f} s", flush=True)
        torch.cuda.empty_cache()
        write(found, path)


def memory_table(rows: Sequence[dict[str, Any]]) -> str:
    tp = {each["model"]: each["allocated_nbytes"] for each in rows if each["way"] == TP}
    lines = [
        "| model | plan | mesh | planned GiB | max_memory_allocated GiB | of the plan | below TP8 |",
        "|---|---|---|---|---|---|---|",
    ]
    for each in rows:
        below = f"{1 - each['allocated_nbytes'] / tp[each['model']]:.1%}" if each["model"] in tp else ""
        lines.append(
            f"| {each['model']} | {each['way']} | {each['mesh']} | {each['planned_nbytes'] / 2**30:.2f} "
            f"| {each['allocated_nbytes'] / 2**30:.2f} | {each['allocated_nbytes'] / each['planned_nbytes']:.4f} | {below} |"
        )
    return "\n".join(lines) + "\n"


def seconds_table(rows: Sequence[dict[str, Any]], least: float = 0.01) -> str:
    """Classes of layers that take more than a part of the step's compute."""
    lines = [
        "| model | plan | layers | ms a pass | before | after |",
        "|---|---|---|---|---|---|",
    ]
    for each in rows:
        found = [layer for layer in each["layers"] if layer["measured"] > least * each["compute_seconds"]]
        every = {"name": "all", "measured": each["compute_seconds"], "before": each["before_seconds"],
                 "after": each["after_seconds"]}  # fmt: skip
        for layer in (*found, every):
            lines.append(
                f"| {each['model']} | {each['way']} | {layer['name']} | {1e3 * layer['measured']:.2f} "
                f"| {layer['before'] / layer['measured'] - 1:+.1%} | {layer['after'] / layer['measured'] - 1:+.1%} |"
            )
    return "\n".join(lines) + "\n"


def operators_table(rows: Sequence[dict[str, Any]]) -> str:
    lines = ["| model | plan | operators | calls | ms | before | after |", "|---|---|---|---|---|---|---|"]
    for each in rows:
        for one in each["operators"]:
            if one["measured"] and one["measured"] > 0.002 * each["compute_seconds"]:
                lines.append(
                    f"| {each['model']} | {each['way']} | {one['name']} | {one['times']} | {1e3 * one['measured']:.2f} "
                    f"| {one['before'] / one['measured'] - 1:+.1%} | {one['after'] / one['measured'] - 1:+.1%} |"
                )
    return "\n".join(lines) + "\n"


def misordered(rows: Sequence[dict[str, Any]], by: str) -> list[str]:
    """Pairs of plans of one model whose measured seconds differ by more than `FAR`, and whose predicted ones are ordered
    otherwise."""
    found = []
    for one, other in combinations(rows, 2):
        if one["model"] == other["model"]:
            fast, slow = sorted((one, other), key=lambda each: each["compute_seconds"])
            if slow["compute_seconds"] > (1 + FAR) * fast["compute_seconds"] and slow[by] <= fast[by]:
                found.append(f"{one['model']}: {fast['way']} is faster than {slow['way']}")
    return found


def page(found: dict[str, Any]) -> str:
    rows = found["rows"]
    order = [f"by the seconds {by}: {misordered(rows, f'{by}_seconds') or 'as measured'}" for by in ("before", "after")]
    return "\n".join([
        "# Rank 0 of plans for 32 devices on one GPU\n", memory_table(rows), "Seconds of compute, by class of layers and pass:\n",
        seconds_table(rows), f"Order of plans by compute, {order[0]}; {order[1]}.\n", "By class of operators:\n",
        operators_table(rows),
    ])  # fmt: skip


def plots(rows: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Measured against predicted, by model: on the dashed line both are the same."""

    def drawn(title: str, unit: str, pairs: dict[str, list[tuple[float, float]]]) -> str:
        most = max(max(point) for each in pairs.values() for point in each)
        series = [Series(name=name, points=sorted(each), colour=k) for k, (name, each) in enumerate(pairs.items())]
        line = Series(name="equal", points=[(0.0, 0.0), (most, most)], colour=6, dashed=True, mark=False)
        return plot(title, f"predicted, {unit}", f"measured, {unit}", [*series, line])

    by_model = {name: [each for each in rows if each["model"] == name] for name in dict.fromkeys(each["model"] for each in rows)}
    nbytes = {
        name: [(e["planned_nbytes"] / 2**30, e["allocated_nbytes"] / 2**30) for e in each] for name, each in by_model.items()
    }
    seconds = {name: [(1e3 * e["after_seconds"], 1e3 * e["compute_seconds"]) for e in each] for name, each in by_model.items()}
    return {
        "rehearsed-bytes": drawn("Peak of rank 0 on one H200, six plans a model", "GiB", nbytes),
        "rehearsed-seconds": drawn("Compute of rank 0 on one H200, six plans a model", "ms a step", seconds),
    }


def write(found: dict[str, Any], path: Path) -> None:
    path.write_text(json.dumps(found, indent=1))
    path.with_suffix(".md").write_text(page(found))
    for name, text in plots(found["rows"]).items():
        (path.parent / f"{name}.svg").write_text(text)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", type=Path, required=True, help="the folder of the plans")
    parser.add_argument("--run", action="store_true", help="rehearse them on this machine's GPU")
    parser.add_argument("--only", default="", help="cases whose model has this in its name")
    parser.add_argument("--seconds", type=float, default=60, help="for one plan, at most")
    parser.add_argument("--results", type=Path, default=RESULTS / "rehearse", help="the folder to write to")
    args = parser.parse_args(arguments)
    warnings.simplefilter("ignore", PlanWarning)
    if not args.run:
        make(args.plans, args.seconds)
        return
    args.results.mkdir(parents=True, exist_ok=True)
    run(args.plans, [case for case in CASES if args.only in case.model], args.results)


if __name__ == "__main__":
    main()
