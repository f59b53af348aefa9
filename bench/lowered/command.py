"""One rank of a plan on one device, against a block written by hand and against the plan's own bytes.

    python -m bench.lowered [--dim 4096] [--heads 32] [--ranks 8] [--batch 4] [--seq 2048] [--vocab 50304] [--layers 4]
                            [--rounds 60] [--device cuda] [--json FILE]

The plan is Megatron's tensor parallelism over all ranks in bf16; this is rank 0, and communication does nothing.

    time      forward and backward of one block: by hand, lowered, and lowered under torch.compile, in turns; medians over rounds
              of the ratios within a round
    memory    a step of the whole model, with AdamW's states beside it: the allocator's peak against the plan's
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bench.lowered.local_block import LocalBlock, Silent
from bench.machine import machine
from scrimp import Plan, zoo
from scrimp.lower import Generated, Lowered, Shards, lower, module
from scrimp.planner import baseline_plan

STATES_NBYTES = 12  # of a parameter in bf16: master and two moments
WARM_UP = 10  # rounds
PASSES = 20  # behind each other in each round, so that the host runs ahead of the device as in training


def planned(arguments: argparse.Namespace) -> Plan:
    shape = {key: getattr(arguments, key) for key in ("dim", "heads", "layers", "vocab", "seq")}
    with torch.device("meta"):
        model = zoo.build("gpt-tiny", **shape)
    batch = zoo.example_batch("gpt-tiny", arguments.batch, **shape)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return baseline_plan(model, batch, f"{arguments.ranks}xH100", "tp", mesh=f"tp={arguments.ranks}", precision="bf16")


def weights_of(lowered: Lowered, device: torch.device, layer: str = "") -> dict[str, Tensor]:
    """Whole ones, small enough for 16 bits."""
    names = {name: each for name, each in lowered.rest.items() if name.startswith(layer)}
    return {name: torch.randn(each.shape, device=device).mul_(0.02).bfloat16() for name, each in names.items()}


def passes(layer: Callable[[Tensor], Tensor], parameters: list[nn.Parameter], x: Tensor, given: Tensor) -> Callable[[], None]:
    def once() -> None:
        for each in parameters:
            each.grad = None
        x.grad = None
        layer(x).backward(given)

    return once


def clocked(once: Callable[[], None], device: torch.device) -> float:
    """Milliseconds of a forward and backward."""
    if device.type != "cuda":
        start = time.perf_counter()
        for _ in range(PASSES):
            once()
        return 1e3 * (time.perf_counter() - start) / PASSES
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    for _ in range(PASSES):
        once()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / PASSES


def blocks_in_turns(plan: Plan, arguments: argparse.Namespace) -> dict[str, Any]:
    device = torch.device(arguments.device)
    lowered = lower(plan, plan.source.graph)
    ours = module(plan, "blocks.1", weights_of(lowered, device, "blocks.1."), comm=Silent(plan.mesh))
    hand = LocalBlock(arguments.dim, arguments.heads, arguments.ranks).to(device, torch.bfloat16)
    hand.load_state_dict(ours.state_dict())
    x = torch.randn(arguments.batch, arguments.seq, arguments.dim, device=device, dtype=torch.bfloat16).requires_grad_()
    given = torch.randn_like(x)
    runs = {
        name: passes(layer, [*(hand if name == "by hand" else ours).parameters()], x, given)
        for name, layer in (("by hand", hand), ("lowered", ours), ("lowered, compiled", torch.compile(ours)))
    }
    with torch.no_grad():
        difference = float((ours(x) - hand(x)).abs().max())
    rows: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(WARM_UP + arguments.rounds):
        order = list(runs)[number % 3 :] + list(runs)[: number % 3]
        for name in order:
            taken = clocked(runs[name], device)
            if number >= WARM_UP:
                rows[name].append(taken)
    ratios = {name: [a / b for a, b in zip(taken, rows["by hand"], strict=True)] for name, taken in rows.items()}
    return {
        "output_difference": difference,
        "median_ms": {name: statistics.median(taken) for name, taken in rows.items()},
        "ratio_to_by_hand": {name: statistics.median(taken) for name, taken in ratios.items()},
        "compiled_to_lowered": statistics.median(a / b for a, b in zip(rows["lowered, compiled"], rows["lowered"], strict=True)),
    }


class Leaving(Shards):
    """In bf16 a gradient is used for the update as soon as it is there, and is gone."""

    def accumulate(self, name: str, *args: Any, **kwargs: Any) -> None:
        super().accumulate(name, *args, **kwargs)
        del self.gradients[name]


def peak_of_a_step(plan: Plan, arguments: argparse.Namespace) -> dict[str, Any]:
    device, graph = torch.device(arguments.device), plan.source.graph
    lowered, comm = lower(plan, graph), Silent(plan.mesh)
    shards = Leaving(lowered.rest, comm, weights_of(lowered, torch.device("cpu")), device=device)
    states = [
        torch.empty(STATES_NBYTES * each.numel(each.states, plan.mesh), dtype=torch.uint8, device=device)
        for each in lowered.rest.values()
        if each.trained
    ]
    batch: Mapping[str, Tensor] = {
        value.name: torch.randint(arguments.vocab, value.shape, device=device) for value in graph.batch
    }
    run = Generated(lowered, comm, shards, device=device)
    measured = []
    for _ in range(2):  # in the first one kernels take their workspace
        torch.cuda.reset_peak_memory_stats()
        run.step(batch)
        torch.cuda.synchronize()
        measured.append(torch.cuda.max_memory_allocated())
    planned_nbytes = plan.memory.peak_nbytes
    return {
        "planned_nbytes": planned_nbytes, "planned_at": plan.memory.where, "measured_nbytes": measured[-1],
        "states_nbytes": sum(each.nbytes for each in states), "ratio": measured[-1] / planned_nbytes,
    }  # fmt: skip


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (
        ("dim", 4096), ("heads", 32), ("ranks", 8), ("batch", 4), ("seq", 2048), ("vocab", 50304), ("layers", 4), ("rounds", 60),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(given)
    torch.manual_seed(0)
    plan = planned(arguments)
    found: dict[str, Any] = {"machine": machine(), "settings": {**vars(arguments), "json": None}}
    if arguments.device == "cuda":
        found["memory"] = peak_of_a_step(plan, arguments)
    found["time"] = blocks_in_turns(plan, arguments)
    print(json.dumps(found, indent=2))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=2))
