"""How soon `planner.solve` finds an allowed choice of a large raw problem, and how good it is over time.

    python -m bench.solver.raw run 65000 [--seconds 120] [--cpu]     one problem, into bench/results/solver/
    python -m bench.solver.raw page                                  the table and the plot of all that are there

Seconds count from the call of `solve`. With `--cpu` the search's clock, and every time shown, is the CPU time of its one thread:
what an idle core would take, measured on a machine that is not idle. The best known value of a problem is the least of the
planted choice's and all runs'. Every value shown is of a choice within the limit; the last one is judged by `evaluate`.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

from bench.machine import machine
from bench.solver.raw_problems import raw_problem
from bench.svg import Series, plot
from scrimp.errors import FitError, PlanError
from scrimp.planner import evaluate, solve

RESULTS = Path(__file__).parents[1] / "results" / "solver"
MOMENTS = (5, 15, 30, 60)


def run(count: int, seed: int, seconds: float, cpu: bool) -> dict[str, Any]:
    planted = raw_problem(count, seed)
    problem = planted.problem
    clock = time.process_time if cpu else time.monotonic
    if cpu:
        time.monotonic = time.process_time  # the planner's clock
    trace: list[tuple[float, float]] = []
    begin = 0.0

    def tell(objective: str, value: float, bound: float) -> None:
        if objective == "seconds":
            trace.append((clock() - begin, value))

    row: dict[str, Any] = {
        "nodes": count, "seed": seed, "edges": len(problem.edges), "points": problem.points, "limit_nbytes": problem.limit_nbytes,
        "clock": "cpu" if cpu else "wall", "asked_seconds": seconds, "planted_seconds": evaluate(problem, planted.choice).seconds,
        "machine": {name: text for name, text in machine().items() if name in ("cpu", "cores", "commit")},
    }  # fmt: skip
    begin = clock()
    try:
        solution = solve(problem, objective="time", seconds=seconds, progress=tell)
    except (FitError, PlanError) as error:
        return {**row, "spent_seconds": clock() - begin, "failed": str(error), "trace": trace}
    row |= {"spent_seconds": clock() - begin, "found_seconds": solution.seconds, "peak_nbytes": solution.peak_nbytes}
    return {**row, "bound": solution.phases[-1].bound, "status": solution.status, "trace": trace}


def at(row: dict[str, Any], moment: float) -> float:
    """The best value by then."""
    return min((value for when, value in row["trace"] if when <= moment), default=math.inf)


def page(rows: list[dict[str, Any]]) -> str:
    head = [
        "nodes",
        "edges",
        "points",
        "clock",
        "first, s",
        *(f"at {moment} s" for moment in MOMENTS),
        "best known, s",
        "planted",
    ]
    lines = [
        "# Large raw problems", "", "Written by `python -m bench.solver.raw page`. \"At 5 s\": the value then, over the "
        "best known (the least of the planted choice's and of all runs').", "",
        f"| {' | '.join(head)} | bound | end, s |", "|" + "---|" * (len(head) + 2),
    ]  # fmt: skip
    series = []
    for k, row in enumerate(rows):
        best = best_known(row, rows)
        first = f"{row['trace'][0][0]:.1f}" if row["trace"] else "none"
        values = [f"{at(row, moment) / best:.3f}" if at(row, moment) < math.inf else "none" for moment in MOMENTS]
        cells = [f"{row['nodes']:,}", f"{row['edges']:,}", f"{row['points']:,}", row["clock"], first, *values, f"{best:.4g}"]
        cells += [
            f"{row['planted_seconds'] / best:.3f}",
            f"{row['bound'] / best:.3f}" if "bound" in row else "",
            f"{row['spent_seconds']:.1f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
        steps = [(when, value / best) for when, value in row["trace"]]
        series.append(Series(name=f"{row['nodes']:,} nodes", points=steps, colour=k, mark=False))
        level = row["planted_seconds"] / best
        end = max(when for one in rows for when, _ in one["trace"] or [(1.0, 0.0)])
        series.append(
            Series(name=f"{row['nodes']:,}: planted", points=[(0, level), (end, level)], colour=k, dashed=True, mark=False)
        )
    (RESULTS / "raw.svg").write_text(plot("Value over time, over the best known", f"{rows[0]['clock']} seconds", "value", series))
    return "\n".join([*lines, "", "![Value over time](raw.svg)", ""])


def best_known(row: dict[str, Any], rows: list[dict[str, Any]]) -> float:
    alike = [one for one in rows if (one["nodes"], one["seed"]) == (row["nodes"], row["seed"])]
    return min(min(one["planted_seconds"], one.get("found_seconds", math.inf)) for one in alike)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "page"))
    parser.add_argument("nodes", type=int, nargs="?", default=50_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--cpu", action="store_true")
    args = parser.parse_args()
    RESULTS.mkdir(parents=True, exist_ok=True)
    if args.what == "run":
        row = run(args.nodes, args.seed, args.seconds, args.cpu)
        path = RESULTS / f"raw-{args.nodes}-{args.seed}-{row['clock']}-{args.seconds:.0f}s.json"
        path.write_text(json.dumps(row, indent=None) + "\n")
        print({name: value for name, value in row.items() if name not in ("trace", "machine")})
    else:
        rows = [json.loads(path.read_text()) for path in RESULTS.glob("raw-*.json")]
        (RESULTS / "raw.md").write_text(page(sorted(rows, key=lambda row: (row["nodes"], row["seed"], row["clock"]))))


if __name__ == "__main__":
    main()
