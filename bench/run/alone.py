"""A lowered model against eager PyTorch in one process, without communication: what generated source costs.

    python -m bench.run.alone [--rounds 20] [--threads 1] [--quick] [--json FILE]

Forward and backward in fp32, in turns, of a GPT and a Llama of hidden size 1,024, and of a GPT of hidden size 32. The plan is for
one rank and keeps all activations. The ratio is the median over rounds of the ratio within a round. For the small model, whose
operators take little, the difference is also shown for one operator. Ends with 1 if the losses differ; times are figures of
this machine and fail nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import scrimp
from bench.machine import machine
from scrimp import Mesh, zoo
from scrimp.lower import Call, Generated, Ranks, Shards, lower

WIDE = {"dim": 1024, "heads": 16, "layers": 2, "vocab": 2048, "seq": 128}
NARROW = {"dim": 32, "heads": 4, "layers": 2, "vocab": 64, "seq": 16}
MODELS: dict[str, tuple[str, dict[str, int]]] = {
    "gpt, 1024": ("gpt-tiny", WIDE),
    "llama, 1024": ("llama-tiny", {**WIDE, "kv_heads": 16, "hidden": 2816}),
    "gpt, 32": ("gpt-tiny", NARROW),
}
ROWS, WARM_UP = 4, 3
PASSES = {"gpt, 32": 50}  # in a row, where one pass is too short for the clock
QUICK = {"rounds": 2}
SAME = 1e-6  # losses, relative: the same operators, in another order where gradients are added


def ways(name: str) -> tuple[dict[str, Callable[[], float]], int]:
    """What runs a forward and backward, and returns the loss; and the number of operators that a lowered pass calls."""
    preset, settings = MODELS[name]
    torch.manual_seed(0)
    model, batch = zoo.build(preset, **settings), zoo.example_batch(preset, ROWS, **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plan = scrimp.plan(model, batch, "1xCPU", mesh="x=1", precision="fp32", activations="keep", time_limit=5)
    graph = plan.source.graph
    lowered = lower(plan, graph)
    whole = {name: each.detach() for name, each in (*model.named_parameters(), *model.named_buffers())}
    comm = Ranks(Mesh({"x": 1}), 0)
    shards = Shards(lowered.rest, comm, whole)
    run = Generated(lowered, comm, shards)
    given = {value.name: tensor for value, tensor in zip(graph.batch, batch, strict=True)}

    def eager() -> float:
        model.zero_grad()
        loss = model(*batch)
        loss.backward()
        return float(loss.detach())

    def lowering() -> float:
        shards.gradients.clear()
        return float(run.step(given))

    calls = sum(isinstance(step, Call) for layer in lowered.layers for half in (layer.ahead, layer.behind) for step in half.steps)
    return {"eager": eager, "lowered": lowering}, calls


def in_turns(name: str, rounds: int) -> dict[str, Any]:
    both, calls = ways(name)
    losses = {way: run() for way, run in both.items()}
    seconds: dict[str, list[float]] = {way: [] for way in both}
    for number in range(WARM_UP + rounds):
        for way in sorted(both, reverse=bool(number % 2)):
            start = time.perf_counter()
            for _ in range(PASSES.get(name, 1)):
                both[way]()
            if number >= WARM_UP:
                seconds[way].append((time.perf_counter() - start) / PASSES.get(name, 1))
    ratios = sorted(a / b for a, b in zip(seconds["lowered"], seconds["eager"], strict=True))
    middle = {way: statistics.median(taken) for way, taken in seconds.items()}
    return {
        "seconds": middle,
        "ratio": statistics.median(ratios),
        "quartiles": [ratios[len(ratios) // 4], ratios[(3 * len(ratios)) // 4]],
        "operators": calls,
        "us_an_operator": 1e6 * (middle["lowered"] - middle["eager"]) / calls,
        "difference": abs(losses["lowered"] / losses["eager"] - 1),
    }


def table(rows: dict[str, dict[str, Any]]) -> str:
    lines = [
        f"{'model':14}{'eager ms':>10}{'lowered ms':>12}{'ratio':>8}{'half of them':>16}{'operators':>11}{'us more each':>14}"
    ]
    for name, row in rows.items():
        eager, lowered = (1e3 * row["seconds"][way] for way in ("eager", "lowered"))
        low, high = row["quartiles"]
        lines.append(
            f"{name:14}{eager:10.2f}{lowered:12.2f}{row['ratio']:8.3f}{f'{low:.3f} to {high:.3f}':>16}{row['operators']:11}"
            f"{row['us_an_operator']:14.2f}"
        )
    return "\n".join(lines)


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="too few rounds to say anything about time")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(given)
    if arguments.quick:
        vars(arguments).update(QUICK)
    torch.set_num_threads(arguments.threads)
    rows = {name: in_turns(name, arguments.rounds) for name in MODELS}
    facts = machine()
    print(", ".join(f"{key} {facts[key]}" for key in ("cpu", "cores", "load", "torch", "commit")))
    print(table(rows))
    if arguments.json is not None:
        settings = {key: value for key, value in vars(arguments).items() if key != "json"}
        arguments.json.write_text(json.dumps({"machine": facts, "settings": settings, "models": rows}, indent=2))
    if any(row["difference"] > SAME for row in rows.values()):
        print("the losses differ")
        sys.exit(1)


if __name__ == "__main__":
    main()
