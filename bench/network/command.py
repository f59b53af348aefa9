"""Training over a slow network, side by side: `make bench-network`, or `python -m bench.network [--mbit 200] [--rounds 3]`.

Every contender trains the same model in processes of its own, in turns, on ranks in network namespaces with limited cables.
What is known for this commit is not measured again. Results are rows in bench/results/network/COMMIT.json, and as tables in
COMMIT.md beside it. Where there can be no such network, it says why and ends well; a run whose byte counters cannot be, or
whose ranks end with different weights, makes it end with 1.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from bench.gpu.results import RESULTS, Row, read_rows, write_rows
from bench.machine import machine
from bench.network.case import Case
from bench.network.contenders import CONTENDERS
from bench.network.netns import counters, missing, network
from bench.network.netns_ranks import RanksError, run_ranks
from bench.network.results import LINE, key_of, row_of, steps_to, summary, table, usable

RATES, TUNED_AT = (0.005, 0.01, 0.02, 0.03, 0.04), 1000  # rates of learning, and Mbit/s of the links meanwhile
LINE_S = 2.0  # for so long a plain socket sends


def main(arguments: Sequence[str] | None = None) -> int:
    args = _arguments(arguments)
    reason = missing()
    if reason is not None:
        print(f"bench-network: skipped: {reason}")
        return 0
    here = machine()
    args.results.mkdir(parents=True, exist_ok=True)
    rows = usable(read_rows([args.results]), args.commit, here)
    base = Case(mbit=1, **{name: value for name, value in vars(args).items() if name in ("batch", "steps", "ranks", "width")})
    if args.tune:
        tune(replace(base, mbit=TUNED_AT), args)
        return 0
    cases = [replace(base, mbit=mbit) for mbit in args.mbit or (200, 1000)]
    for turn in range(args.rounds):
        for case in cases:
            for name in [*([LINE] if turn == 0 else []), *(args.contender or CONTENDERS)]:
                own = case if name == LINE else replace(case, rate=args.rate or CONTENDERS[name].rate)
                key = key_of(name, own, turn)
                if key in rows:
                    continue
                about = {"contender": name, "case": asdict(own), "round": turn, "commit": args.commit, "machine": here}
                about["when"], before = datetime.now(UTC).isoformat(timespec="seconds"), Spent.now()
                rows[key] = {**about, **measure(name, own, args.seconds)}
                rows[key]["others"] = Spent.now().by_others(before, os.cpu_count() or 1)
                write_rows(args.results, args.commit, rows.values())
                print(f"{case.mbit} Mbit/s, round {turn}, {name}: {summary(rows[key])}", flush=True)
    tables = "\n".join(table(case, rows.values()) for case in cases)
    facts = "".join(f"- {name}: {value}\n" for name, value in {**here, "commit": args.commit}.items())
    (args.results / f"{args.commit}.md").write_text(f"# make bench-network\n\n{facts}\n{tables}")
    print(f"\n{tables}")
    return int(any(row.get("wrong") or "failed" in row for row in rows.values()))


def tune(case: Case, args: argparse.Namespace) -> None:
    """The steps that each contender takes to the loss with each rate of learning: the network has no part in that."""
    for name in args.contender or CONTENDERS:
        for rate in [args.rate] if args.rate else RATES:
            row = measure(name, replace(case, rate=rate), args.seconds)
            found = summary(row) if "failed" in row else f"{steps_to(case.target, row) or 'never'}, of {len(row['losses'])} steps"
            print(f"{name}, rate {rate:g}: {found}", flush=True)


def measure(name: str, case: Case, seconds: float) -> Row:
    try:
        if name == LINE:
            with network(ranks=2, mbit=case.mbit) as net:
                return dict(run_ranks(net, "bench.network.line", [str(int(LINE_S * case.mbit * 1e6 / 8))], seconds=seconds)[0])
        with network(ranks=case.ranks, mbit=case.mbit) as net:
            before = counters(net)
            said = run_ranks(net, "bench.network.rank", [name, json.dumps(asdict(case))], seconds=seconds)
            outside = [now.since(then) for now, then in zip(counters(net), before, strict=True)]
        return row_of(said, case, name, outside)
    except RanksError as error:
        return {"failed": str(error)}


@dataclass(frozen=True)
class Spent:
    """Seconds since some start: by the clock, of all cores together by anybody, and of those by this process and those it
    has waited for. What the system does for packets that come in is nobody's."""

    clock: float
    anybody: float
    own: float

    @classmethod
    def now(cls) -> Spent:
        with open("/proc/stat") as file:
            user, nice, system, _idle, _disk, _irq, _packets, stolen = map(int, file.readline().split()[1:9])
        usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        anybody = (user + nice + system + stolen) / os.sysconf("SC_CLK_TCK")
        return cls(time.monotonic(), anybody, sum(usage.ru_utime + usage.ru_stime for usage in usages))

    def by_others(self, before: Spent, cores: int) -> float:
        """The share of the cores that others had since then."""
        others = (self.anybody - before.anybody) - (self.own - before.own)
        return max(0.0, others / (cores * (self.clock - before.clock)))


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    commit = machine()["commit"].partition(",")[0]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--mbit", type=int, action="append", help="Mbit/s of every cable; several may be given; else 200 and 1000"
    )
    parser.add_argument("--contender", choices=[*CONTENDERS], action="append", help="these alone")
    parser.add_argument("--rounds", type=int, default=3, help="how often everybody has a turn")
    parser.add_argument("--ranks", type=int, default=Case.ranks)
    parser.add_argument("--batch", type=int, default=Case.batch, help="of one rank")
    parser.add_argument("--width", type=int, default=Case.width, help="of the model's layers")
    parser.add_argument("--rate", type=float, help="of learning, for everybody; else each has its own")
    parser.add_argument("--tune", action="store_true", help="steps to the loss by rate of learning, and nothing else")
    parser.add_argument("--steps", type=int, default=Case.steps, help="timed ones, of who sends gradients whole")
    parser.add_argument("--seconds", type=float, default=300, help="at most, for one contender's turn")
    parser.add_argument("--results", type=Path, default=RESULTS / "network", help="the folder to write to")
    parser.add_argument("--commit", default=commit, help="what to call this code, where there is no git")
    return parser.parse_args(arguments)
