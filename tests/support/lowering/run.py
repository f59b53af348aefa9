"""Runs plans: all ranks as threads, and one process with plain PyTorch beside them."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from random import Random
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from scrimp import Plan
from scrimp.capture import Graph
from scrimp.lower import (
    Buckets,
    Communicator,
    Interpreter,
    Lowered,
    Overlap,
    Runner,
    Shards,
    buckets_of,
    cut,
    later_axes,
    lower,
    overlap_of,
)
from scrimp.lower.steps import Call, Step
from scrimp.planner import evaluate
from scrimp.planner.answers.from_solution import layers_of
from tests.support.lowering.live_bytes import LiveBytes
from tests.support.lowering.threads import ThreadRank, on_threads

STATES = {"adamw": 8, "sgd": 4}  # bytes of a parameter's states in fp32


@dataclass(frozen=True)
class Ran:
    loss: float
    gradients: dict[str, torch.Tensor]
    peak_nbytes: int = 0
    where: str = ""
    moves: int = 0


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: each.detach() for name, each in (*model.named_parameters(), *model.named_buffers())}


def batch_of(graph: Graph, batch: Any) -> dict[str, torch.Tensor]:
    """The tensors of a batch by the names of the graph."""
    given = [*batch.values()] if isinstance(batch, Mapping) else [*batch]
    return {value.name: tensor for value, tensor in zip(graph.batch, given, strict=True)}


def plainly(model: nn.Module, batch: Any) -> Ran:
    """One process, autograd."""
    model = copy.deepcopy(model)
    result = model(**batch) if isinstance(batch, Mapping) else model(*batch)
    loss = result if isinstance(result, torch.Tensor) else result["loss"]
    loss.backward()
    return Ran(float(loss.detach()), {name: each.grad for name, each in model.named_parameters() if each.grad is not None})


class _Metered(Shards):
    """Gradients that have leaving and bytes on the host are counted apart."""

    meter: LiveBytes

    def accumulate(self, name: str, *args: Any, **kwargs: Any) -> None:
        super().accumulate(name, *args, **kwargs)
        for gradient in self.gradients.values():
            self.meter.ignore(gradient)

    def leave(self, *args: Any, **kwargs: Any) -> None:
        super().leave(*args, **kwargs)
        for gradient in self.gradients.values():
            self.meter.ignore(gradient)

    def offload(self, tensor: torch.Tensor) -> torch.Tensor:
        with _disable_current_modes():
            return super().offload(tensor)


def at_rest_nbytes(lowered: Lowered, optimizer: str) -> int:
    """Weights, gradients and states of the rank with most, in fp32."""
    mesh, total = lowered.mesh, 0
    for each in lowered.rest.values():
        total += 4 * each.numel(each.weight, mesh)
        if each.trained:
            total += 4 * each.numel(each.gradient, mesh) + STATES[optimizer] * each.numel(each.states, mesh)
    return total


def metered(
    lowered: Lowered,
    comm: Communicator,
    whole: Mapping[str, torch.Tensor],
    batch: Mapping[str, torch.Tensor],
    runner: type[Runner] = Interpreter,
    buckets: Buckets | None = None,
    overlap: Overlap | None = None,
) -> tuple[float, LiveBytes, _Metered]:
    """One step of one rank. Bytes: all live storages but those of moves under way, and what is at rest."""
    shards = _Metered(lowered.rest, comm, whole, later_axes((lowered,), accumulated=False), buckets=buckets, overlap=overlap)
    run = runner(lowered, comm, shards)
    part = {name: cut(tensor, lowered.batch[name], comm.mesh, comm.rank).clone() for name, tensor in batch.items()}
    now = [""]

    def before(layer: Any, step: Step) -> None:
        op = layer.chosen.ops[step.op].op if isinstance(step, Call) else None
        now[0] = f"{layer.path} {step if op is None else op.target + (' backward' if op.backward else '')}"

    if isinstance(run, Interpreter):
        run.before = before
    shards.meter = LiveBytes(lambda: now[0])
    with shards.meter:
        for tensor in part.values():
            shards.meter.count(tensor)
        for tensor in (*shards.weights.values(), *shards.buffers.values()):
            shards.meter.ignore(tensor)
        loss = run.step(part)
    return float(loss), shards.meter, shards


def on_all_ranks(
    plan: Plan,
    graph: Graph,
    model: nn.Module,
    batch: Any,
    runner: type[Runner] = Interpreter,
    *,
    together: bool = False,
    beside: bool = False,
) -> list[Ran]:
    """A step of every rank, as threads. `together`: moves run in buckets. `beside`: and beside operators."""
    lowered = lower(plan, graph)
    later = later_axes((lowered,), accumulated=False)
    buckets = buckets_of(lowered, later) if together else None
    overlap = overlap_of(lowered, buckets, later) if beside and buckets is not None else None
    whole, given = tensors_of(model), batch_of(graph, batch)
    fixed = at_rest_nbytes(lowered, plan.optimizer)

    def job(comm: ThreadRank) -> Ran:
        loss, meter, shards = metered(lowered, comm, whole, given, runner, buckets, overlap)
        moves = comm.moves
        gradients = {name: shards.whole_gradient(name) for name in shards.gradients}
        return Ran(loss, gradients, meter.peak + fixed, meter.at, moves)

    return on_threads(plan.mesh, job)


def drawn(plan: Plan, random: Random) -> Plan:
    """A plan with choices drawn from all options of the problem behind another one."""
    source = plan.source
    choice = tuple(random.randrange(len(node.options)) for node in source.problem.nodes)
    found = evaluate(source.problem, choice)
    layers = tuple(layers_of(source.assembly, SimpleNamespace(choice=choice)))  # type: ignore[arg-type]
    return replace(plan, layers=layers, memory=replace(plan.memory, peak_nbytes=found.peak_nbytes))


def worst_of(found: Ran, wanted: Ran) -> tuple[float, str]:
    """The largest error of a gradient relative to its norm. A gradient that is zero but for rounding (of a key's bias, of a bias
    before batch norm) is measured against a floor, a tenth of the largest norm of any gradient: 1e-5 of that is 17 roundings u of
    numbers of that size, where a sum over N = 8,192 positions loses up to sqrt(N) u = 90 u."""
    floor = 0.1 * max(float(each.norm()) for each in wanted.gradients.values())
    assert found.gradients.keys() == wanted.gradients.keys()
    return max(
        (float((found.gradients[name] - each).norm()) / max(float(each.norm()), floor), name)
        for name, each in wanted.gradients.items()
    )
