"""Writes docs/results/raw/performance.md and its plots from what is in bench/results/: `python -m bench.gpu.page`.

Every figure comes from there; what was not measured is said to be so.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bench.gpu.cases import Case
from bench.gpu.contenders import COMPUTE, CONTENDERS, FSDP2, FSDP2_KEPT, PLAIN, SCRIMP, ZERO2, ZERO3
from bench.gpu.results import RESULTS, TOLERANCE, Row, key_of, page, read_rows, same_machine, share_of_bound, title
from bench.gpu.sections import SECTIONS, Point, points_on
from bench.svg import Series, plot
from scrimp.ledger import parse_nbytes

DOCS = Path(__file__).resolve().parents[2] / "docs" / "results" / "raw"
NOT_YET = "Not measured yet."
MODES = ("unclipped", "clipped")
INTRODUCTION = f"""# Performance

Written by `python -m bench.gpu.page` from `bench/results/`, which `make bench-gpu` fills: every contender in a process of
its own on the same machine, from the same weights, on the same batch, in the same precision (bf16 weights and gradients, fp32
masters and AdamW states), with the same blocks recomputed. A step's time is the interval between the ends of two steps on the
GPU's own clock, in steady state; the median is shown, after warm-up. "To the end" is the time of all timed steps, with all
that the last of them left to be done, over their number. "Of its bound" is `engine.bound()`'s least time over the step's, at
the rate that the host's kernel reached in the run; "of the physical" the same at the machine's own rates. "Host" is by how
much the host's available memory fell. "Apart" is how far the losses are from scrimp's at the step where they are farthest:
more than {TOLERANCE} nats would not be the same training, and is said so. Everybody clips with torch's `clip_grad_norm_` but for
scrimp and DeepSpeed, which have their own; of gradients on the host, as FSDP2 has them, torch takes norms with one thread.
"""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--docs", type=Path, default=DOCS)
    parser.add_argument("--device", default="cuda", help="whose rows; those of a CPU are for trying this out")
    args = parser.parse_args(arguments)
    found = [row for row in read_rows([args.results]) if _case(row).device == args.device]
    rows = {key_of(row["contender"], _case(row)): row for row in found if same_machine(row, found[-1])}  # the newest one's
    names = [name for name in SECTIONS if name.startswith("tiny") == (args.device == "cpu")]
    text = [INTRODUCTION, *_machines(rows), *_asked(rows)]
    for what, points in _plotted(args.device).items():
        text += [f"## Step time against {what}", ""]
        for mode in MODES:
            series = _series(what, points, mode, rows)
            if not any(one.points for one in series):
                text += [f"{mode}: {NOT_YET}", ""]
                continue
            path = args.docs / f"step-time-by-{what.split()[-1]}-{mode}.svg"
            x_label = "parameters, in billions" if what == "model size" else "cap on the GPU, GiB"
            path.write_text(plot(f"Step time against {what}, {mode}", x_label, "seconds per step", series))
            text += [f"![Step time against {what}, {mode}]({path.name})", ""]
    for name in names:
        text += [page(name, args.device, rows) or f"## {name}\n\n{NOT_YET}\n"]
    (args.docs / "performance.md").write_text("\n".join(text))


def _plotted(device: str) -> dict[str, list[Point]]:
    sizes, caps = (["sizes"], "caps") if device == "cuda" else (["tiny", "tiny-llama"], "tiny")
    return {"model size": [point for name in sizes for point in points_on(device, name)], "the cap": points_on(device, caps)}


def _series(what: str, points: Sequence[Point], mode: str, rows: dict[str, Row]) -> list[Series]:
    """Each contender's line, and the bound of scrimp's. Against the cap the others are level lines, from the memory that they
    need on: more does not make them faster."""
    found = []
    for colour, name in enumerate(CONTENDERS):
        line: list[tuple[float, float]] = []
        bounds: dict[str, list[tuple[float, float]]] = {"least_seconds": [], "physical_seconds": []}
        for point in points:
            seen = _mode(rows.get(key_of(name, point.case)), mode)
            if seen is not None:
                x = point.case.parameters() / 1e9 if what == "model size" else parse_nbytes(point.case.cap) / 2**30
                line.append((x, seen["median_s"]))
                for least, places in bounds.items():
                    places += [(x, seen["bound"][least])] if least in seen.get("bound", {}) else []
        level = what == "the cap" and name != SCRIMP
        if level:
            line = _level(name, points, mode, rows)
        found.append(Series(name=name, points=sorted(line), colour=colour, mark=not level))
        for shade, (least, words) in enumerate([("least_seconds", "its bound"), ("physical_seconds", "the physical bound")]):
            drawn = {"colour": colour + 5 * shade, "dashed": True, "mark": False}
            found.append(Series(name=f"{name}: {words}", points=sorted(bounds[least]), **drawn))
    return found


def _level(name: str, points: Sequence[Point], mode: str, rows: dict[str, Row]) -> list[tuple[float, float]]:
    caps = [parse_nbytes(point.case.cap) / 2**30 for point in points]
    for row in rows.values():
        seen = _mode(row, mode)
        if row["contender"] == name and seen is not None and replace(_case(row), cap=points[0].case.cap) == points[0].case:
            return [(row["reserved_nbytes"] / 2**30, seen["median_s"]), (max(caps), seen["median_s"])]
    return []


def _asked(rows: dict[str, Row]) -> list[str]:
    """What the engine is meant to reach, and what was measured."""
    lines = ["## Targets", "", "| at | mode | target | measured |", "|---|---|---|---|"]
    at_24, at_80, at_12, batch_32 = (SECTIONS[name]()[0].case for name in ("24GiB", "80GiB", "12GiB", "batch-32"))
    fits, kept = (point.case for point in SECTIONS["all-fits"]())
    for case, others, mode, least, words in [
        (at_24, [FSDP2], "unclipped", 1.8, "times FSDP2's speed"),
        (at_24, [FSDP2], "clipped", 1.55, "times FSDP2's speed"),
        (at_80, [FSDP2], "unclipped", 3.6, "times FSDP2's speed"),
        (at_80, [FSDP2], "clipped", 3.2, "times FSDP2's speed"),
        (at_80, [FSDP2_KEPT], "unclipped", 3.2, "times FSDP2's speed, weights kept (compute alone is the limit)"),
        (at_80, [FSDP2_KEPT], "clipped", 3.2, "times FSDP2's speed, weights kept"),
        (at_12, [ZERO2, ZERO3], "unclipped", 1.8, "times DeepSpeed's best"),
        (batch_32, [COMPUTE], "unclipped", 0.9, "of compute alone"),
        (fits, [PLAIN], "unclipped", 0.97, "of plain PyTorch's speed"),
        (kept, [PLAIN], "unclipped", 0.97, "of plain PyTorch's speed"),
    ]:
        ours = _mode(rows.get(key_of(SCRIMP, case)), mode)
        theirs = [seen["median_s"] for name in others if (seen := _mode(rows.get(key_of(name, case)), mode))]
        seen = f"{min(theirs) / ours['median_s']:.2f}" if ours and theirs else NOT_YET
        lines.append(f"| {title(case)} | {mode} | at least {least} {words} | {seen} |")
    for case in (at_24, at_80, at_12, batch_32):
        for mode in MODES:
            ours = _mode(rows.get(key_of(SCRIMP, case)), mode)
            for asked, least in [("92% of its bound", "least_seconds"), ("75% of the physical one", "physical_seconds")]:
                seen = share_of_bound(ours, least) if ours else ""
                lines.append(f"| {title(case)} | {mode} | at least {asked} | {seen or NOT_YET} |")
    largest = max(_trained(rows, "fp32"), key=lambda row: _case(row).parameters(), default=None)
    rate = 6 * _case(largest).parameters() / largest["built_s"] / 1e9 if largest else 0  # states are zeros that nobody wrote
    built = f"{rate:.1f}: {largest['built_s']:.1f} s" if largest else NOT_YET
    lines += [
        f"| largest trained four steps | unclipped | 18B parameters | {title(_case(largest)) if largest else NOT_YET} |",
        f"| its construction | | 5 GB/s of weights and masters | {built} |",
    ]
    eighth = max(_trained(rows, "int8"), key=lambda row: _case(row).parameters(), default=None)
    lines.append(f"| with int8 states | unclipped | 28B parameters | {title(_case(eighth)) if eighth else NOT_YET} |")
    return [*lines, ""]


def _trained(rows: dict[str, Row], states: str) -> list[Row]:
    """scrimp's that came to their end."""
    return [row for row in rows.values() if row["contender"] == SCRIMP and "failed" not in row and _case(row).states == states]


def _machines(rows: dict[str, Row]) -> list[str]:
    if not rows:
        return [NOT_YET, ""]
    last = max(rows.values(), key=lambda row: str(row["when"]))
    facts = [f"- {name}: {value}" for name, value in last["machine"].items() if name not in ("commit", "load")]
    commits = sorted({row["commit"] for row in rows.values()})
    return ["## The machine", "", *facts, f"- commits: {', '.join(commits)}", ""]


def _mode(row: Row | None, mode: str) -> Row | None:
    return None if row is None else row.get("modes", {}).get(mode)


def _case(row: Row) -> Case:
    return Case(**row["case"])


if __name__ == "__main__":
    main()
