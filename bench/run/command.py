"""A planned training step against PyTorch's own parallelism for the same strategy, on 8 gloo ranks of this machine.

    python -m bench.run [--dim 256] [--heads 8] [--layers 4] [--vocab 2048] [--seq 64] [--batch 8] [--ranks 8]
                        [--warm-up 8] [--rounds 40] [--part tp] [--part zero-3] [--mbit 1000] [--quick] [--json FILE]

    tp        Megatron's tensor parallelism over all ranks, against DTensor (`parallelize_module`)
    zero-3    data parallelism with everything sharded, against FSDP2 (`fully_shard` of each block and of the root)

Both ways train the same model in fp32 by SGD with momentum, on the same ranks and on the same global batch, in turns. A step is
forward, backward and update, between barriers. With `--mbit` each rank is in a network namespace of its own, with a link of so
many Mbit/s each way (Linux, root): it shows what communication beside operators saves. The ratio is the median over rounds of the
ratio within a round. Ends with 1 if the two ways differ in a loss; times are figures of this machine and fail nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import warnings
from functools import partial
from pathlib import Path
from typing import Any

from bench.machine import machine
from bench.network.netns import missing, network
from bench.network.netns_ranks import run_ranks
from bench.run.ways import DTENSOR, FSDP, MODEL, SCRIMP
from scrimp import zoo
from scrimp.ext.ranks import RankPool
from scrimp.planner import baseline_plan

CONTENDERS = {"tp": DTENSOR, "zero-3": FSDP}
SAME = 1e-5  # first losses, relative: the same sums of fp32 in another order
QUICK = {"dim": 32, "layers": 1, "vocab": 64, "seq": 8, "batch": 8, "warm_up": 2, "rounds": 2}
JOB_SECONDS = 1200.0


def planned(way: str, shape: dict[str, int], rows: int, ranks: int) -> str:
    model, batch = zoo.build(MODEL, **shape), zoo.example_batch(MODEL, rows, **shape)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cluster = f"{ranks}xCPU"
        return baseline_plan(model, batch, cluster, way, mesh=f"x={ranks}", precision="fp32", optimizer="sgd").to_json()


def here(ranks: int, *job: Any, **rest: int) -> dict[str, Any]:
    """What rank 0 measured, on the loopback."""
    with RankPool(ranks, timeout_seconds=JOB_SECONDS) as pool:
        found: dict[str, Any] = pool.run("bench.run.ways:in_turns", *job, **rest)[0]
    return found


def over_links(ranks: int, *job: Any, mbit: int, **rest: int) -> dict[str, Any]:
    """The same, each rank behind a link of its own."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file, network(ranks=ranks, mbit=mbit) as net:
        json.dump({"job": job, "rest": rest}, file)
        file.flush()
        found: dict[str, Any] = run_ranks(net, "bench.run.rank", [file.name], seconds=JOB_SECONDS)[0]
    return found


def summary(found: dict[str, Any], contender: str) -> dict[str, Any]:
    """Of what rank 0 measured."""
    ours, theirs = (found["seconds"][name] for name in (SCRIMP, contender))
    pairs = [*zip(found["losses"][SCRIMP], found["losses"][contender], strict=True)]
    ratios = sorted(b / a for a, b in zip(ours, theirs, strict=True))
    return {
        "seconds": {SCRIMP: statistics.median(ours), contender: statistics.median(theirs)},
        "to_scrimp": {SCRIMP: 1.0, contender: statistics.median(ratios)},
        "quartiles": [ratios[len(ratios) // 4], ratios[(3 * len(ratios)) // 4]],
        "nbytes": found["nbytes"],
        "loss": pairs[0][0],
        "first_difference": abs(pairs[0][1] / pairs[0][0] - 1),
        "largest_difference": max(abs(b / a - 1) for a, b in pairs),
    }


def table(parts: dict[str, dict[str, Any]]) -> str:
    lines = [f"{'strategy':10}{'way':10}{'s a step':>10}{'to scrimp':>11}{'MB sent':>10}"]
    for way, part in parts.items():
        for name, seconds in part["seconds"].items():
            sent = f"{part['nbytes'][name] / 1e6:10.1f}" if part["nbytes"][name] else f"{'unknown':>10}"
            lines.append(f"{way:10}{name:10}{seconds:10.3f}{part['to_scrimp'][name]:11.3f}{sent}")
    for way, part in parts.items():
        verdict = "the same" if part["first_difference"] <= SAME else "NOT THE SAME"
        lines.append(
            f"{way}: {verdict} first loss ({part['loss']:.6f}, relative difference {part['first_difference']:.1e}; "
            f"{part['largest_difference']:.1e} at most in the warm-up); half of the ratios are within "
            f"{part['quartiles'][0]:.3f} and {part['quartiles'][1]:.3f}"
        )
    return "\n".join(lines)


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (
        ("dim", 256), ("heads", 8), ("layers", 4), ("vocab", 2048), ("seq", 64), ("batch", 8), ("ranks", 8), ("warm-up", 8),
        ("rounds", 40),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--part", action="append", choices=[*CONTENDERS], help="only this one; may be given again")
    parser.add_argument("--mbit", type=int, help="the speed of each rank's link; without it ranks use the loopback")
    parser.add_argument("--quick", action="store_true", help="a model that is too small to say anything about time")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(given)
    if arguments.quick:
        vars(arguments).update(QUICK)
    shape = {key: getattr(arguments, key) for key in ("dim", "heads", "layers", "vocab", "seq")}
    if arguments.mbit and (why := missing()) is not None:
        parser.error(f"--mbit {arguments.mbit}: {why}")
    rest = {"warm_up": arguments.warm_up, "rounds": arguments.rounds}
    parts = {}
    for way in arguments.part or CONTENDERS:
        plan = planned(way, shape, arguments.batch, arguments.ranks)
        run = partial(over_links, mbit=arguments.mbit) if arguments.mbit else here
        found = run(arguments.ranks, plan, CONTENDERS[way], shape, arguments.batch, **rest)
        parts[way] = summary(found, CONTENDERS[way])
    settings = {key: value for key, value in vars(arguments).items() if key != "json"}
    facts = machine()
    print(", ".join(f"{key} {facts[key]}" for key in ("cpu", "cores", "load", "torch", "commit")))
    print(", ".join(f"{key} {value}" for key, value in settings.items()))
    print(table(parts))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"machine": facts, "settings": settings, "parts": parts}, indent=2))
    if any(part["first_difference"] > SAME for part in parts.values()):
        sys.exit(1)
