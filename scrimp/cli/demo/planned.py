"""The last part of `scrimp demo`: two plans of a small GPT run on four ranks; predicted bytes beside measured ones."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from scrimp.ext.ranks import RankPool

if TYPE_CHECKING:
    from scrimp.planner import Plan

MODEL, SETTINGS = "gpt-tiny", {"dim": 128, "layers": 4}
MESH, WORLD, ROWS, STEPS = "x=2,y=2", 4, 8, 3
SECONDS = 5.0  # of the search
MORE = 0.01  # a plan may be exceeded by that share
SAME = 1e-4  # relative difference of losses: AdamW turns gradients that are zero but for rounding into full steps


@dataclass(frozen=True, kw_only=True)
class Ran:
    """A plan's prediction, and the run. `live_nbytes`: peak of all storages of the busiest rank; `workspace_nbytes`: what kernels
    took beside them at the peak of both."""

    name: str
    planned_nbytes: int
    live_nbytes: int
    workspace_nbytes: int
    losses: tuple[float, ...]


def planned(ranks: RankPool, seed: int) -> list[Ran]:
    """Trains with a least-memory plan and with data parallelism, on four ranks."""
    from scrimp import zoo
    from scrimp.planner import baseline_plan, plan

    model, batch = zoo.build(MODEL, **SETTINGS), zoo.example_batch(MODEL, ROWS, **SETTINGS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the search stops at its time limit
        least = plan(model, batch, f"{WORLD}xCPU", mesh=MESH, precision="fp32", time_limit=SECONDS)
    data = baseline_plan(model, batch, f"{WORLD}xCPU", "ddp", mesh=MESH, precision="fp32", seconds=SECONDS)
    return [
        _ran(name, found, ranks.run(train, found.to_json(), seed)) for name, found in (("least memory", least), ("DDP", data))
    ]


def _ran(name: str, plan: Plan, found: list[tuple[list[float], int, int]]) -> Ran:
    return Ran(
        name=name,
        planned_nbytes=plan.memory.peak_nbytes,
        live_nbytes=max(live for _, live, _ in found),
        workspace_nbytes=max(whole - live for _, live, whole in found),
        losses=tuple(found[0][0]),
    )


def train(plan: str, seed: int) -> tuple[list[float], int, int]:
    """On a rank: the losses, the peak of live storages, and the peak with kernels' workspace."""
    import torch

    from scrimp import AdamW, Engine, Plan, zoo

    torch.manual_seed(seed)
    model = zoo.build(MODEL, **SETTINGS)
    with Engine(model, plan=Plan.from_json(plan), optimizer=AdamW(lr=1e-3), precision="fp32", device="cpu") as engine:
        losses = [float(engine.step(*zoo.example_batch(MODEL, ROWS, step=step, **SETTINGS))) for step in range(STEPS)]
        return losses, engine.ledger.device.live_peak.nbytes, engine.ledger.peak_nbytes


def broken(ran: list[Ran]) -> list[str]:
    """The promises that these runs broke."""
    found = [
        f"the plan '{one.name}' predicts {one.planned_nbytes:,} bytes, and its run took {one.live_nbytes:,}"
        for one in ran
        if one.live_nbytes > (1 + MORE) * one.planned_nbytes
    ]
    for one, other in zip(ran[0].losses, ran[1].losses, strict=True):
        if abs(one - other) > SAME * abs(other):
            found.append(f"a loss is {one!r} with the plan '{ran[0].name}' and {other!r} with '{ran[1].name}'")
    return found


def show(console: Console, ran: list[Ran]) -> None:
    made = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    made.add_column("bytes on the busiest rank", no_wrap=True)
    for one in ran:
        made.add_column(one.name, justify="right", no_wrap=True)

    def row(name: str, *cells: Any) -> None:
        made.add_row(name, *map(str, cells))

    row("predicted by the plan", *(f"{one.planned_nbytes:,}" for one in ran))
    row("measured", *(f"{one.live_nbytes:,}" for one in ran))
    row("  measured / predicted", *(f"{one.live_nbytes / one.planned_nbytes:.2%}" for one in ran))
    row("kernels' workspace beside it", *(f"{one.workspace_nbytes:,}" for one in ran))
    row(f"loss of step {STEPS - 1}", *(f"{one.losses[-1]:.6f}" for one in ran))
    console.print(made)
