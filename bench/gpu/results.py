"""Rows of `make bench-gpu`: kept by contender and case, in one file for each commit, and shown as tables.

A row is {"contender", "case", "commit", "machine", "when", ...what bench.gpu.run printed}, with "failed" where it did not
come to its end.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from bench.gpu.cases import Case
from bench.gpu.contenders import COMPUTE, PLAIN, SCRIMP
from bench.gpu.sections import SECTIONS, Point, points_on
from scrimp.ledger import format_nbytes, parse_nbytes

RESULTS = Path(__file__).parents[1] / "results"
TOLERANCE = 0.05  # nats: how far losses in bf16 may be from scrimp's at any step
PLAIN_NBYTES = 14  # of each parameter, at least: bf16 weight, fp32 master and two states
SAME_MACHINE = ("gpu", "cpu", "cores", "torch")
COLUMNS = ["contender", "mode", "s/step", "spread", "to the end", "times scrimp's", "of its bound", "of the physical"]
COLUMNS += ["built", "GPU reserved", "host", "loss", "apart"]

Row = dict[str, Any]


def key_of(contender: str, case: Case) -> str:
    return f"{contender} | {json.dumps(asdict(case), sort_keys=True)}"


def read_rows(folders: Iterable[Path]) -> list[Row]:
    """Of every file there, the oldest first."""
    files = {path.resolve() for folder in folders for path in folder.glob("*.json")}
    rows = [row for path in files for row in json.loads(path.read_text())["rows"]]
    return sorted(rows, key=lambda row: str(row["when"]))


def same_machine(row: Row, other: Row) -> bool:
    return all(row["machine"].get(name) == other["machine"].get(name) for name in SAME_MACHINE)


def usable(rows: Sequence[Row], commit: str, machine: dict[str, str], *, keep: bool) -> dict[str, Row]:
    """Those of this commit; with `keep` also older ones of contenders that do not change with it, from such a machine."""
    found = {}
    for row in rows:
        same = same_machine(row, {"machine": machine})
        mine = row["commit"] == commit != "unknown" or (keep and row["contender"] != SCRIMP)
        again = row.get("failed", "") == "not installed" or row.get("failed", "").startswith("not done in")  # by now it may be
        if same and mine and not again and not commit.endswith("-changed"):
            found[key_of(row["contender"], Case(**row["case"]))] = row
    return found


def write_rows(folder: Path, commit: str, rows: Iterable[Row]) -> None:
    path = folder / f"{commit}.json"
    fresh = path.with_suffix(".part")
    fresh.write_text(json.dumps({"commit": commit, "rows": [*rows]}, indent=1))
    fresh.replace(path)


def spared(contender: str, case: Case, rows: dict[str, Row]) -> Row | None:
    """What need not be measured: a model that cannot fit, or what was seen under another cap that made no difference."""
    if contender == PLAIN and PLAIN_NBYTES * case.parameters() > parse_nbytes(case.cap):
        return {"failed": f"not run: it needs {format_nbytes(PLAIN_NBYTES * case.parameters())} at least"}
    if contender == SCRIMP:  # it makes use of what it is given
        return None
    for row in rows.values():
        other = Case(**row["case"])
        if row["contender"] != contender or replace(other, cap=case.cap, host=case.host) != case:
            continue
        fitted = "failed" not in row and parse_nbytes(other.cap) <= parse_nbytes(case.cap)
        if fitted or row.get("failed") == "host memory ran out":
            return {**row, "case": asdict(case), "seen_at": other.cap}
    return None


def parity(row: Row, base: Row | None) -> str:
    """How far the losses are from scrimp's, at the step where they are farthest."""
    if base is None or row is base or row["contender"] == COMPUTE or not row.get("losses") or not base.get("losses"):
        return ""
    apart = max(abs(a - b) for a, b in zip(row["losses"], base["losses"], strict=False))
    return f"{apart:.4f}" if apart <= TOLERANCE else f"{apart:.4f}: NOT THE SAME"


def share_of_bound(mode: Row, least: str = "least_seconds") -> str:
    """`least`: the bound at the host kernel's own rate, or "physical_seconds"."""
    seconds = mode.get("bound", {}).get(least)
    return f"{seconds / mode['median_s']:.0%}" if seconds else ""


def title(case: Case) -> str:
    notes = [f"{case.parameters() / 1e9:.2f}B parameters", f"{case.layers} layers of {case.dim}", f"batch {case.batch}"]
    notes += [f"sequence {case.seq}", f"cap {case.cap}"] + (["nothing recomputed"] if case.recompute == "none" else [])
    return f"{case.model}, " + ", ".join(notes) + (f", {case.states} states" if case.states != "fp32" else "")


def page(section: str, device: str, rows: dict[str, Row]) -> str:
    """What a section is for, and its tables; nothing where there are none."""
    found = tables(points_on(device, section), rows)
    about = (SECTIONS[section].__doc__ or "").partition(". ")[0].removesuffix(".")
    return f"## {section}\n\n{' '.join(about.split())}.\n\n{found}" if found else ""


def tables(points: Sequence[Point], rows: dict[str, Row]) -> str:
    """One for each point that has rows: seconds per step of each mode, times scrimp's."""
    lines: list[str] = []
    for point in points:
        here = [rows[key] for contender in point.contenders if (key := key_of(contender, point.case)) in rows]
        if not here:
            continue
        base = next((row for row in here if row["contender"] == SCRIMP and row.get("modes")), None)
        lines += [
            f"{title(point.case)}:",
            "",
            f"| {' | '.join(COLUMNS)} |",
            "|---" * len(COLUMNS) + "|",
        ]
        lines += [line for row in here for line in _lines(row, base)]
        texts = [
            f"{mode}:\n{found['bound']['text']}" for mode, found in (base or {}).get("modes", {}).items() if "bound" in found
        ]
        lines += ["", *(["```text", *texts, "```", ""] if texts else [])]
    return "\n".join(lines)


def _lines(row: Row, base: Row | None) -> list[str]:
    lines = []
    name = row["contender"] + (f" (seen at {row['seen_at']})" if "seen_at" in row else "")
    if base is not None and row.get("run") != base.get("run"):  # perhaps not at the same time on the same machine
        name += " (another run)"
    for mode, found in row.get("modes", {}).items():
        ours = (base or {}).get("modes", {}).get(mode)
        losses = row["losses"]
        cells = [
            f"{found['median_s']:.3f}",
            f"{found['least_s']:.3f} to {found['most_s']:.3f}",
            f"{found['window_s'] / row['case']['steps']:.3f}",
            f"{found['median_s'] / ours['median_s']:.2f}" if ours else "",
            share_of_bound(found),
            share_of_bound(found, "physical_seconds"),
            f"{row['built_s']:.1f} s",
            format_nbytes(row["reserved_nbytes"]) if row.get("reserved_nbytes") else "",
            format_nbytes(row["host_nbytes"]),
            f"{losses[0]:.3f} to {losses[-1]:.3f}",
            parity(row, base),
        ]
        lines.append(f"| {name} | {mode} | {' | '.join(cells)} |")
    if "failed" in row:
        lines.append(f"| {name} | | {row['failed']} {'|' * (len(COLUMNS) - 2)}")
    return lines
