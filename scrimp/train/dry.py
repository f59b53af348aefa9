"""`--dry-run`: what a device will take, by a plan and its rehearsal on meta. Nothing is allocated."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from torch import nn

from scrimp.chunks import Optimizer
from scrimp.cluster import Cluster
from scrimp.layout import Mesh
from scrimp.ledger import format_nbytes, parse_nbytes
from scrimp.planner import Plan
from scrimp.rehearsal import rehearse_all
from scrimp.train.config.sections import AUTO, Config
from scrimp.train.planning import made


def rehearsed(
    config: Config, model: nn.Module, batch: Any, cluster: Cluster | None, plan: Plan | None, optimizer: Optimizer,
    say: Callable[[str], None],
) -> Iterator[str]:  # fmt: skip
    """Lines. Without a plan the engine keeps within its budget, whatever the model needs: the plan with the least memory stands
    for what a step takes where everything stays on the device."""
    if plan is None:
        if cluster is None or cluster.hardware is None:
            yield "predicted peak: unknown, because this device has no preset; name a [cluster]"
            return
        yield from _without_plan(config, model, batch, cluster, optimizer, say)
        return
    yield plan.summary()
    found = rehearse_all(plan, model, batch, optimizer=optimizer)
    most = max(found, key=lambda each: each.peak.nbytes)
    yield (
        f"rehearsed on meta: {len(found)} kinds of ranks; predicted peak of a device {format_nbytes(most.peak.nbytes)} "
        f"({most.peak.nbytes:,} bytes, on rank {most.rank}, in {most.peak.where}); step {most.step_seconds:.4g} s"
    )
    yield _budget(config, most.peak.nbytes)


def _without_plan(
    config: Config, model: nn.Module, batch: Any, cluster: Cluster, optimizer: Optimizer, say: Callable[[str], None]
) -> Iterator[str]:
    assert cluster.hardware is not None
    devices = cluster.hardware.devices
    sections = replace(config.cluster, mesh=str(Mesh({"x": devices})), objective="memory")
    kept = replace(config, cluster=sections, memory=replace(config.memory, device=AUTO))
    plan = made(kept, model, batch, cluster, optimizer, say)
    found = rehearse_all(plan, model, batch, optimizer=optimizer)
    peak = max(each.peak.nbytes for each in found)
    yield (
        f"predicted peak of a device with the least-memory plan on {devices} {cluster.hardware.kind}: {format_nbytes(peak)} "
        f"({peak:,} bytes), rehearsed on meta. Without a plan the engine uses what [memory] device allows, and moves layers to "
        "the host where they do not fit"
    )
    yield _budget(config, peak)


def _budget(config: Config, peak: int) -> str:
    if config.memory.device == AUTO:
        return "budget of a device: auto, by what is free when the run starts"
    budget = parse_nbytes(config.memory.device)
    words = "within it" if peak <= budget else "layers that do not fit go to the host"
    return f"budget of a device: {format_nbytes(budget)}; {words}"
