"""`rehearse`: one rank of a plan runs its real program, without the other ranks. `rehearse_all`: one rank of each class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from scrimp.chunks import SGD, AdamW, Optimizer
from scrimp.cluster import Cluster
from scrimp.engine import LoneRank, Points, Recorder, Timeline, available_host_nbytes, stage_of
from scrimp.errors import FitError, RunError
from scrimp.ledger import Books, Ledger, format_nbytes
from scrimp.planner import Plan
from scrimp.rehearsal.classes import classes
from scrimp.rehearsal.clock import Clock, StepTime
from scrimp.rehearsal.communicator import StubPeers, StubRanks
from scrimp.rehearsal.device_memory import device_memory, start_peaks
from scrimp.rehearsal.meter import StorageMeter
from scrimp.rehearsal.predict import TimedPoints
from scrimp.rehearsal.result import AliveTensor, Rehearsal, RehearsedPeak

DEVICES = ("meta", "cpu", "cuda")
CPU = "CPU"  # the kind of a cluster of processes, which exchange over gloo
TIMED = 2  # steps on the CPU or a GPU, of which the fastest counts
OPTIMIZERS: dict[str, Optimizer] = {"adamw": AdamW(), "sgd": SGD(momentum=0.9)}

Batch = Sequence[Any] | Mapping[str, Any]


def rehearse(
    plan: Plan, model: nn.Module, batch: Batch, rank: int = 0, on: str = "meta", *, optimizer: Optimizer | None = None
) -> Rehearsal:
    """Run one rank of a plan here, without the other ranks, and return its memory over time and its seconds.

    On "meta" nothing is allocated, whatever the size. On "cpu" and "cuda" the rank runs for real, with random weights and the
    given batch, and its compute is timed. What other ranks would send has the right sizes, and no meaning.

    >>> import scrimp
    >>> from scrimp import zoo
    >>> model, batch = zoo.build("gpt-tiny", layers=1), zoo.example_batch("gpt-tiny", batch=8)
    >>> plan = scrimp.plan(model, batch, "2xCPU", mesh="x=2", precision="fp32", time_limit=1)
    >>> found = scrimp.rehearse(plan, model, batch, rank=1)
    >>> found.peak.nbytes == max(found.totals)
    True

    Arguments:
        plan: Of this model and this batch.
        model: It may be on meta, and does not change.
        batch: The global batch of a step, as for `scrimp.plan`: positional arguments, or keywords. Tensors may be on meta.
        rank: 0 to the number of ranks - 1, stage by stage if the plan has pipeline stages.
        on: "meta", "cpu" or "cuda".
        optimizer: The default is the plan's, with default settings.
    """
    return _rehearsed(plan, model, batch, rank, on, optimizer)[0]


def rehearse_all(
    plan: Plan, model: nn.Module, batch: Batch, on: str = "meta", *, optimizer: Optimizer | None = None
) -> tuple[Rehearsal, ...]:
    """Rehearse one rank of each class of ranks with the same program and sizes; `ranks` of each result has the class."""
    found = []
    stages = 1 if plan.schedule is None else len(plan.schedule.stages)
    for first in range(0, stages * plan.mesh.size, plan.mesh.size):
        result, lone, comm = _rehearsed(plan, model, batch, first, on, optimizer)
        for members in classes(lone, comm.programs.values()):
            ranks = tuple(first + rank for rank in members)
            each = result if first in ranks else _rehearsed(plan, model, batch, ranks[0], on, optimizer)[0]
            found.append(replace(each, ranks=ranks))
    return tuple(found)


def _rehearsed(
    plan: Plan, model: nn.Module, batch: Batch, rank: int, on: str, optimizer: Optimizer | None
) -> tuple[Rehearsal, LoneRank, StubRanks]:
    stage, inside = stage_of(plan, rank)
    device, cluster = _device(on), Cluster.from_json(plan.cluster)
    native = on == "cuda" or (on == "meta" and (cluster.hardware is None or cluster.hardware.kind != CPU))
    _check_room(plan, stage, device)
    books = Books(device=Ledger(tier=on))
    # Operators without a device make small tensors on the CPU, also under meta: ranks on the CPU count them.
    meter = StorageMeter(books.device, on, *(["cpu"] if on == "meta" and not native else []))
    clock = Clock(device)
    comm = StubRanks(plan.mesh, inside, cluster, clock, native=native)
    peers = StubPeers(plan.mesh, cluster, clock) if plan.schedule is not None and len(plan.schedule.stages) > 1 else None
    lone = LoneRank(
        plan, model, rank=rank, optimizer=optimizer or OPTIMIZERS[plan.optimizer], device=device, comm=comm, peers=peers,
        meter=meter, books=books, staged=plan.precision != "fp32" and not native,
    )  # fmt: skip
    recorder, timed = Recorder(books.device, meter, partial(_number, meter)), TimedPoints(clock, cluster, lone)
    try:
        args, kwargs = _given(batch, device)
        lone.step(args, kwargs, Both(recorder, timed), metered=True)
        took = clock.result() if on == "meta" else _timed(lone, timed, clock, args, kwargs, device)
    except torch.cuda.OutOfMemoryError as error:
        raise FitError(f"rank {rank} does not fit on this GPU: {error}; rehearse on='meta'", tier="device") from error
    finally:
        lone.close()
    timeline = recorder.timeline()
    return (
        Rehearsal(
            rank=rank, stage=stage, on=on, points=timeline.points, kinds=timeline.kinds, peak=_peak(timeline, meter),
            planned_nbytes=lone.program.peak_nbytes, compute_seconds=None if on == "meta" else took.compute,
            predicted_seconds=sum(each.predicted_seconds for each in took.layers),
            communication_seconds=took.communication, overlap_seconds=took.overlap, step_seconds=_with_bubble(plan, took.step),
            layers=took.layers, operators=took.operators, device_memory=device_memory(device, max(timeline.totals)),
        ),
        lone,
        comm,
    )  # fmt: skip


def _number(meter: StorageMeter, ended: int) -> None:
    meter.point = ended + 1


def _peak(timeline: Timeline, meter: StorageMeter) -> RehearsedPeak:
    points, totals = timeline.points, timeline.totals
    at = max(range(len(points)), key=totals.__getitem__)
    alive = tuple(
        AliveTensor(nbytes=each.nbytes, kind=each.kind, shape=each.shape, dtype=each.dtype, made_at=points[each.point])
        for each in meter.alive_at_largest()
    )
    kinds = {kind: row[at] for kind, row in timeline.kinds.items()}
    return RehearsedPeak(nbytes=totals[at], point=at, where=points[at], kinds=kinds, alive=alive)


def _device(on: str) -> torch.device:
    if on not in DEVICES:
        raise RunError(f"on={on!r}: it is one of {', '.join(DEVICES)}")
    if on == "cuda" and not torch.cuda.is_available():
        raise RunError("on='cuda': there is no GPU here; rehearse on='meta', which needs none, or on='cpu'")
    return torch.device(on)


def _check_room(plan: Plan, stage: int, device: torch.device) -> None:
    """On the CPU a rank that does not fit would end the process, not raise."""
    peak = (plan if plan.schedule is None else plan.schedule.stages[stage]).memory.peak_nbytes
    room = available_host_nbytes() if device.type == "cpu" else peak
    if peak > room:
        raise FitError(
            f"on='cpu': the plan has a peak of {format_nbytes(peak)}, and this machine has {format_nbytes(room)} available; "
            "rehearse on='meta', which takes no memory",
            tier="device",
        )


def _given(batch: Batch, device: torch.device) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The batch on the device. Tensors on meta become random numbers elsewhere, or, of integers, zeros: valid as indices."""

    def moved(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if leaf.is_meta and device.type != "meta":
            made = torch.zeros_like(leaf, device=device)
            return made.normal_() if made.is_floating_point() else made
        return leaf.to(device)

    if isinstance(batch, Mapping):
        return (), {name: moved(leaf) for name, leaf in batch.items()}
    if isinstance(batch, torch.Tensor):
        return (moved(batch),), {}
    return tuple(map(moved, batch)), {}


def _timed(
    lone: LoneRank, timed: TimedPoints, clock: Clock, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device
) -> StepTime:
    """The fastest of some steps, with operators as measured in a step of their own."""
    if device.type == "cuda":
        start_peaks(device)
    found = []
    for k in range(-1, TIMED + 1):  # the first one warms up, the last one has operators
        clock.fine = k == TIMED
        lone.step(args, kwargs, timed, metered=False)
        found.append(clock.result())
    fastest = min(found[1:-1], key=lambda each: each.compute)
    return replace(fastest, operators=found[-1].operators)


def _with_bubble(plan: Plan, seconds: float) -> float:
    """A pipeline stage also waits for others, as long as the plan predicts."""
    return seconds / (1 - plan.schedule.bubble) if plan.schedule is not None else seconds


class Both:
    """Tells two of every point."""

    def __init__(self, one: Points, other: Points) -> None:
        self._both = one, other

    def begin(self) -> None:
        for each in self._both:
            each.begin()

    def watch(self, runner: Any, layer: Any, program: Any, number: int) -> None:
        for each in self._both:
            each.watch(runner, layer, program, number)

    def end(self, name: str) -> None:
        for each in self._both:
            each.end(name)
