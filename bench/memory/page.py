"""docs/results/raw/memory.md from the rows of `bench.memory`: every figure comes from there, and missing ones are named.

`python -m bench.memory.page [--device cpu]`: the rows of the newest run on such a device.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from bench.gpu.results import RESULTS, Row, read_rows, same_machine
from bench.memory.case import SMALL, Case
from bench.memory.contenders import CONTENDERS, DGC, SCRIMP
from scrimp.ledger import format_nbytes

DOCS = Path(__file__).resolve().parents[2] / "docs" / "results" / "raw"
NOT_YET = "Not measured yet."
LOWER = 0.805  # at least, asked of a whole step in bf16
TIMES = 4  # at least, asked of the batch, in the DGC layout's
INTRODUCTION = """# Memory

Written by `python -m bench.memory.page` from `bench/results/memory/`, which `make bench-memory` fills: every contender in a
process of its own, world size 1, momentum SGD, the same model and batch for all. On CUDA a peak is the allocator's
`max_memory_allocated` from the first step on, for everybody, with all that was made before it; cuBLAS is given 128 KiB of
workspace, where it would take 32 MiB for every thread. On the CPU it is the C library's high-water mark of mapped memory (what
every thread of the process allocates, in blocks of 64 KiB or more; scrimp's arenas for the host tier are mapped apart from it);
whole steps on the CPU are metered by torch's profiler.

"DGC layout" is Deep Gradient Compression as its reference code lays memory out (`bench/memory/dgc.py`): momentum, residual, a
gradient that is never freed, a magnitude copy and a mask of the whole layer.
"""
EXCHANGE = """What each takes above weights and one momentum buffer, in multiples of the weights: 12 linear layers without bias,
fp32, of which one layer's gradient is 0.08; 5 steps, after a run of a single layer that makes what the libraries keep. Every
row has the same base, so the momentum that DGC keeps as u is in it: above the weights alone its figure would be larger by 1. The
first row is what plain momentum SGD takes, its gradients. PowerSGD makes its new error while the old one, the copy of the
bucket and the bucket itself are there.
"""
STEP = """Peak of a whole training step, batch 32. scrimp: sparse exchange with the residual on the host, every layer
recomputed, budgets searched downward, each 15 % below the last peak; where a budget does not fit, twice as many micro-batches
(a batch norm then sees those). The DGC layout: the same step in plain PyTorch, nothing recomputed, everything on the device, bf16
weights and gradients with fp32 masters where it says bf16.
"""
BATCH = """The largest batch, in one piece, within what the DGC layout takes for a batch of 32: by doubling, then by bisection
to one part in 16. "In micro-batches": the fewest with which four times the DGC layout's batch fits.
"""


def key_of(part: str, contender: str, case: Case) -> str:
    return f"{part} | {contender} | {json.dumps(asdict(case), sort_keys=True)}"


def times_weights(row: Row) -> float:
    """Above weights and one momentum buffer, in multiples of the weights."""
    return float(row["peak_nbytes"] / row["weights_nbytes"] - 2)


def lower(row: Row, base: Row) -> float:
    """By which share a peak is below another's."""
    return float(1 - row["peak_nbytes"] / base["peak_nbytes"])


def summary(row: Row) -> str:
    if "skipped" in row or "failed" in row:
        return str(row.get("failed") or row["skipped"])
    if row["part"] == "exchange":
        return f"{times_weights(row):.3f} times the weights"
    if row["part"] == "step":
        return f"{format_nbytes(row['peak_nbytes'])}, {row.get('accumulate', 1)} micro-batches"
    return f"batch {row['batch']} within {format_nbytes(row['budget_nbytes'])}"


def tables(rows: Sequence[Row]) -> str:
    """Of one device."""
    found = {(row["part"], row["contender"], _where(row)): row for row in rows}
    lines = [*_exchange(found), *_steps(found), *_batches(found)]
    lines += [f"WRONG: {row['part']}, {' '.join(_where(row))}: {what}" for row in rows for what in row.get("wrong", [])]
    return "\n".join(lines)


def _where(row: Row) -> tuple[str, str]:
    return row["case"]["model_name"], row["case"]["precision"]


Found = Mapping[tuple[str, str, tuple[str, str]], Row]


def _exchange(found: Found) -> list[str]:
    lines = ["## Exchange state", "", EXCHANGE]
    lines += _head("contender", "times the weights", "at most, asked", "", "peak", "by its ledger", "on the host")
    for name, contender in CONTENDERS.items():
        row = found.get(("exchange", name, ("linear", "fp32")))
        asked = f"{contender.most:g}" if contender.most is not None else ""
        if row is None or "peak_nbytes" not in row:
            lines.append(f"| {name} | {summary(row) if row else NOT_YET} | {asked} | | | | |")
            continue
        seen = times_weights(row)
        verdict = "" if contender.most is None else _verdict(seen <= contender.most)
        sizes = [format_nbytes(row[key]) if key in row else "" for key in ("peak_nbytes", "ledger_nbytes", "host_tier_nbytes")]
        lines.append(f"| {name} | {seen:.3f} | {asked} | {verdict} | {' | '.join(sizes)} |")
    return [*lines, ""]


def _steps(found: Found) -> list[str]:
    lines = ["## Whole steps", "", STEP]
    lines += _head(
        "model", "precision", DGC, "scrimp", "micro-batches", "lower by", "at least, asked", "", "micro-batches for that"
    )
    for model in SMALL:
        for precision in ("bf16", "fp32"):
            base, row = (found.get(("step", name, (model, precision))) for name in (DGC, SCRIMP))
            asked = f"{LOWER:.1%}" if precision == "bf16" else ""
            theirs = format_nbytes(base["peak_nbytes"]) if base and "peak_nbytes" in base else NOT_YET
            cells = [model, precision, theirs]
            if not base or not row or "peak_nbytes" not in base or "peak_nbytes" not in row:
                cells += [summary(row) if row else NOT_YET, "", "", asked, "", ""]
            else:
                seen = lower(row, base)
                enough = [each for each in row["trials"] if each["peak_nbytes"] is not None and lower(each, base) >= LOWER]
                cells += [format_nbytes(row["peak_nbytes"]), str(row["accumulate"]), f"{seen:.1%}", asked]
                cells += [_verdict(seen >= LOWER) if asked else "", str(min((each["accumulate"] for each in enough), default=""))]
            lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def _batches(found: Found) -> list[str]:
    lines = ["## Largest batch", "", BATCH]
    lines += _head("model", "precision", "budget", DGC, "scrimp", "times", "at least, asked", "", "in micro-batches")
    for model in SMALL:
        base, row = (found.get(("batch", name, (model, "bf16"))) for name in (DGC, SCRIMP))
        measured = base is not None and "batch" in base
        cells = [model, "bf16", format_nbytes(base["budget_nbytes"]) if base and measured else ""]
        cells += [str(base["batch"]) if base and measured else NOT_YET]
        if not base or not row or not measured or "batch" not in row:
            cells += [summary(row) if row else NOT_YET, "", str(TIMES), "", ""]
        else:
            seen, parts = row["batch"] / base["batch"], row["accumulate"]
            reached = _verdict(True) if seen >= TIMES else f"{_verdict(parts is not None)}{' in micro-batches' if parts else ''}"
            cells += [str(row["batch"]), f"{seen:.2f}", str(TIMES), reached, "no" if parts is None else str(parts)]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def _head(*columns: str) -> list[str]:
    return ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]


def _verdict(reached: bool) -> str:
    return "reached" if reached else "NOT REACHED"


def page(rows: Sequence[Row]) -> str:
    """Of the newest row's machine and device."""
    if not rows:
        return f"{INTRODUCTION}\n{NOT_YET}\n"
    last = rows[-1]
    same = [row for row in rows if same_machine(row, last) and row["case"]["small"] == last["case"]["small"]]
    facts = [f"- {name}: {value}" for name, value in last["machine"].items() if name not in ("commit", "load")]
    commits = ", ".join(dict.fromkeys(row["commit"] for row in same))
    small = ["These are small models, as a CPU can train them; the page of a GPU has the real ones.", ""]
    lines = [INTRODUCTION, *(small if last["case"]["small"] else []), "## The machine", "", *facts, f"- commits: {commits}", ""]
    return "\n".join([*lines, tables(same)])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS / "memory")
    parser.add_argument("--docs", type=Path, default=DOCS)
    parser.add_argument("--device", help="whose rows; without it a GPU's, or a CPU's where there are none")
    args = parser.parse_args(arguments)
    rows = read_rows([args.results])
    device = args.device or ("cuda" if any(row["case"]["device"] == "cuda" for row in rows) else "cpu")
    text = page([row for row in rows if row["case"]["device"] == device])
    (args.docs / "memory.md").write_text(text)


if __name__ == "__main__":
    main()
