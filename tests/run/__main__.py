"""`make test-run`: all cases, each once. It goes on where it stopped.

python -m tests.run                   all cases that have no result yet
python -m tests.run --seconds 240     stops after so many seconds
python -m tests.run --only moe        cases whose name has this word; several words: all of them
python -m tests.run --without moe-256 cases whose name does not; several words: none of them
python -m tests.run --again           also those that failed
python -m tests.run --summary         runs nothing
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from collections import defaultdict
from pathlib import Path

from rich.console import Console

from scrimp.ext.ranks import close_pools
from tests.run.cases import Case, every_case
from tests.run.check import LEAST, LEAST_WIDE, Verdict, misordered, run
from tests.run.models import is_wide
from tests.run.results import ROOT, Results, digest_of_sources

STEPS = 20


def main() -> int:
    options = _options()
    console = Console(highlight=False)
    results = Results(options.results, digest_of_sources())
    # In an order that mixes models, meshes and plans, so that a part of the run has seen something of everything.
    cases = sorted(every_case(), key=lambda case: hashlib.sha256(str(case).encode()).digest())
    chosen = [case for case in cases if {*options.only} <= {*str(case).split()} and not {*options.without} & {*str(case).split()}]
    todo = [case for case in chosen if _is_open(results.found.get(str(case)), again=options.again)]
    start = time.monotonic()
    console.print(f"{len(chosen)} cases, {len(chosen) - len(todo)} have a result for these sources ({results.digest})")
    for number, case in enumerate([] if options.summary else todo, start=1):
        if time.monotonic() - start > options.seconds:
            console.print(f"stopped after {options.seconds:g} s")
            break
        verdict = run(case, options.steps)
        results.add(str(case), verdict)
        console.print(f"{number:5d}/{len(todo)} {_word(verdict)} {case}  {_figures(verdict)}", soft_wrap=True)
        for fault in verdict.faults:
            console.print(f"      {fault[-2000:]}", markup=False, soft_wrap=True)
    close_pools()
    return _summary(console, chosen, results)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.run", description=__doc__.partition("\n")[0])
    parser.add_argument("--results", type=Path, default=ROOT / "build" / "test-run.jsonl")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--without", nargs="*", default=[])
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--summary", action="store_true")
    parser.add_argument("--steps", type=int, default=STEPS)
    return parser.parse_args()


def _is_open(verdict: Verdict | None, *, again: bool) -> bool:
    return verdict is None or (again and bool(verdict.faults))


def _word(verdict: Verdict) -> str:
    if verdict.no_plan:
        return "[yellow]no plan[/yellow]"
    return "[red]wrong[/red]" if verdict.faults else "[green]right[/green]"


def _figures(verdict: Verdict) -> str:
    if verdict.no_plan:
        return verdict.no_plan[:160]
    if not verdict.peaks:
        return ""
    peaks = [peak / planned for peak, planned in zip(verdict.peaks, verdict.planned, strict=True)]
    took = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in verdict.seconds.items())
    return f"bytes {min(peaks):.3f} to {max(peaks):.3f} of the plan, error {verdict.off:.2f} of its bound, {took}"


def _summary(console: Console, chosen: list[Case], results: Results) -> int:
    """Returns the exit status: 1 if a case failed, 2 if none did and some have no result."""
    found = {case: results.found[str(case)] for case in chosen if str(case) in results.found}
    groups: dict[tuple[str, ...], dict[str, Verdict]] = defaultdict(dict)
    for case, verdict in found.items():
        pipeline = (f"stages={case.stages}", f"interleave={case.interleave}") if case.stages > 1 else ()
        groups[case.model, case.mesh, case.optimizer, *pipeline][case.way] = verdict
    order = [
        f"{' '.join(key)}: {text}"
        for key, each in groups.items()
        for text in misordered(each, LEAST_WIDE if is_wide(key[0]) else LEAST)
    ]
    wrong = [case for case, verdict in found.items() if verdict.faults]
    without = sum(bool(verdict.no_plan) for verdict in found.values())
    right = len(found) - len(wrong) - without
    console.print(f"{len(found)} of {len(chosen)} cases: {right} right, {len(wrong)} wrong, {without} without a plan")
    console.print(f"{len(order)} pairs of plans are ordered otherwise by measured memory")
    for case in wrong:
        console.print(f"wrong: {case}: {found[case].faults[0][-300:]}", markup=False, soft_wrap=True)
    for text in order:
        console.print(f"order: {text}", markup=False, soft_wrap=True)
    return 1 if wrong or order else 2 if len(found) < len(chosen) else 0


if __name__ == "__main__":
    sys.exit(main())
