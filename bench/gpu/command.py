"""Training within a cap, side by side: `make bench-gpu`, or `python -m bench.gpu --section NAME [--device cpu]`.

Every contender runs in a process of its own, one after the other, so that each has the machine to itself. What is known for
this commit is not measured again. Results are rows in bench/results/COMMIT.json, and as tables in COMMIT.md beside it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

import torch

from bench.gpu.cases import Case
from bench.gpu.contenders import CONTENDERS, available
from bench.gpu.results import RESULTS, Row, key_of, page, read_rows, spared, usable, write_rows
from bench.gpu.sections import SECTIONS, points_on
from bench.gpu.watch import Outcome, watched
from bench.machine import machine


def main(arguments: Sequence[str] | None = None) -> None:
    args, start, run = _arguments(arguments), time.monotonic(), _now()
    here = machine()
    args.results.mkdir(parents=True, exist_ok=True)
    found = read_rows([RESULTS, args.results])
    rows = usable(found, args.commit, here, keep=args.keep)
    rest = {key_of(row["contender"], Case(**row["case"])): row for row in found if row["commit"] == args.commit}
    for section in args.section or [name for name in SECTIONS if not name.startswith("tiny")]:
        failed: set[str] = set()
        for point in points_on(args.device, section):
            for name in point.contenders:
                if (args.contender and name not in args.contender) or (args.cap and point.case.cap not in args.cap):
                    continue
                key = key_of(name, point.case)
                late = time.monotonic() - start > args.budget
                if key not in rows and not late and not (point.search and name in failed):
                    found = spared(name, point.case, rows) or measure(name, point.case, args.seconds)
                    about = {"contender": name, "case": asdict(point.case), "commit": args.commit, "machine": here, "run": run}
                    rows[key] = {**about, "when": _now(), **found}
                    write_rows(args.results, args.commit, {**rest, **rows}.values())
                    print(f"{section}: {_summary(rows[key])}", flush=True)
                if "failed" in rows.get(key, {}):
                    failed.add(name)
        print(page(section, args.device, rows), flush=True)
    facts = "".join(f"- {name}: {value}\n" for name, value in {**here, "commit": args.commit}.items())
    pages = [page(section, args.device, rows) for section in SECTIONS]
    (args.results / f"{args.commit}.md").write_text("\n".join([f"# make bench-gpu\n\n{facts}", *filter(None, pages)]))


def measure(name: str, case: Case, seconds: float) -> Row:
    if not available(name):
        return {"failed": "not installed"}
    command = [sys.executable, "-m", "bench.gpu.run", name, json.dumps(asdict(case))]
    # On a GPU's host the optimizers of most contenders run on all cores, whatever make says for the sake of tests.
    env = {name: value for name, value in os.environ.items() if case.device != "cuda" or name != "OMP_NUM_THREADS"}
    env.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # as scrimp sets it for itself
    return row_of(watched(command, seconds=seconds, env=env), [mode for mode, _, _ in case.modes()])


def row_of(outcome: Outcome, modes: Sequence[str] = ()) -> Row:
    """The last line of JSON that was printed has everything, up to where it failed. Who has all `modes` has not failed: giving
    back 100 GiB of pinned memory may take as long as a step."""
    lines = [line for line in outcome.stdout.splitlines() if line.startswith('{"built_s"') and line.endswith("}")]
    row: Row = {**(json.loads(lines[-1]) if lines else {}), "process_s": outcome.seconds, "host_nbytes": outcome.host_nbytes}
    if modes and [*row.get("modes", {})] == [*modes]:
        pass
    elif outcome.ended is not None:
        row["failed"] = outcome.ended
    elif outcome.returncode < 0:
        row["failed"] = f"killed by signal {-outcome.returncode}"
    elif outcome.returncode:
        last = (outcome.stderr.strip().splitlines() or [f"ended with {outcome.returncode}"])[-1]
        row["failed"] = "out of GPU memory" if "CUDA out of memory" in outcome.stderr else last[:300]
        row["stderr"] = outcome.stderr[-4000:]
    return row


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _summary(row: Row) -> str:
    times = ", ".join(f"{mode} {found['median_s']:.3f} s" for mode, found in row.get("modes", {}).items())
    return f"{row['contender']}: {times} {row.get('failed', '')} (took {row.get('process_s', 0):.0f} s)"


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    commit = machine()["commit"].replace(", changed since", "-changed")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--section", choices=[*SECTIONS], action="append", help="several may be given; without any, all")
    parser.add_argument("--contender", choices=[*CONTENDERS], action="append", help="these alone")
    parser.add_argument("--cap", action="append", help="these alone")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=240, help="at most, for one contender at one point")
    parser.add_argument("--budget", type=float, default=math.inf, help="start nothing more after so many seconds")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the folder to write to")
    parser.add_argument("--keep", action="store_true", help="take other contenders' rows of older commits")
    parser.add_argument("--commit", default=commit, help="what to call this code, where there is no git")
    return parser.parse_args(arguments)
