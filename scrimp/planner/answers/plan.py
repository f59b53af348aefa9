"""`Plan`: the layout of every tensor, predicted memory and step time, and the proven optimality gap."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scrimp.cluster import Cluster, ReservePart
from scrimp.layout import Mesh
from scrimp.ledger import format_nbytes

if TYPE_CHECKING:
    from scrimp.planner.answers.diff import Difference
    from scrimp.planner.answers.explain import Explanation

NOISE = 0.01  # of a plan's peak, or of its step; smaller costs are not reported


@dataclass(frozen=True, kw_only=True)
class Kind:
    """Bytes of one kind on a device at the peak, and how many of them are replicated on other devices."""

    kind: str
    nbytes: int
    redundant_nbytes: int


@dataclass(frozen=True, kw_only=True)
class KeptWhole:
    """An operator without a sharding rule, which every device runs unsharded, `times` in a step; `where`: its first call.
    `redundant_nbytes`: replicated bytes of its inputs and outputs on a device while it runs, at most. `seconds`: added step time
    compared with an even split, including the resharding around it."""

    target: str
    where: str
    times: int
    redundant_nbytes: int
    seconds: float

    def __str__(self) -> str:
        more = f" and {self.times - 1} more" if self.times > 1 else ""
        return (
            f"{self.target} ({self.where}{more}) has no rule, so every device runs all of it: while it runs a device holds "
            f"{format_nbytes(self.redundant_nbytes)} of replicated data, and a step is {self.seconds * 1e3:.3g} ms longer; "
            f"`scrimp rules discover {self.target}` may find a rule"
        )


@dataclass(frozen=True, kw_only=True)
class PlannedMemory:
    """Peak memory of one device. `where`: the operator that runs at the peak."""

    peak_nbytes: int
    kinds: tuple[Kind, ...]
    where: str

    @property
    def floor_nbytes(self) -> int:
        """The peak if each byte held then were on one device only."""
        return self.peak_nbytes - sum(kind.redundant_nbytes for kind in self.kinds)


@dataclass(frozen=True, kw_only=True)
class PlannedReserve:
    """What the budget of a device keeps free of the plan, by part. `limit_nbytes`: what is left for live storages."""

    budget_nbytes: int
    limit_nbytes: int
    parts: tuple[ReservePart, ...]

    def __str__(self) -> str:
        kept = ", ".join(map(str, self.parts)) or "nothing"
        return f"{format_nbytes(self.limit_nbytes)}: the budget of {format_nbytes(self.budget_nbytes)} without {kept}"


@dataclass(frozen=True, kw_only=True)
class PlannedOp:
    """Layouts that an operator needs for its inputs and produces for its outputs. `saved`: its group's activation policy, "keep",
    "recompute" or "offload"."""

    name: str
    target: str
    saved: str
    inputs: tuple[str, ...]
    outputs: tuple[str | None, ...]


@dataclass(frozen=True, kw_only=True)
class PlannedWeight:
    """`layout`: sharding while the weight is used. At rest its weight, gradient and optimizer states are also sharded over these
    axes."""

    name: str
    layout: str
    weight_axes: tuple[str, ...]
    gradient_axes: tuple[str, ...]
    state_axes: tuple[str, ...]

    def __str__(self) -> str:
        """The layout in use, and the additional sharding at rest."""
        axes = {"weight": self.weight_axes, "gradient": self.gradient_axes, "states": self.state_axes}
        if len({*axes.values()}) == 1:
            return f"{self.layout}{f', all over {_star(self.weight_axes)} at rest' if self.weight_axes else ''}"
        return ", ".join([self.layout, *(f"{what} over {_star(each)}" for what, each in axes.items() if each)])


@dataclass(frozen=True, kw_only=True)
class PlannedGroup:
    """One group of operators that are sharded alike. `sizes`: of the atoms that its dims are products of; `split`: the atom that
    each axis of the mesh splits, None where it splits none; `saved`: its activation policy; `level`: its ZeRO level along
    each axis. `name` and `ops` are for readers: the first operator, and how many there are."""

    name: str
    ops: int
    sizes: tuple[int, ...]
    split: tuple[int | None, ...]
    saved: str
    level: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class PlannedLayers:
    """`count` identical layers from `first` on, which is at `path`; `last`: path of the last of them, where known. The layouts in
    `ops` and `weights` follow from `groups`."""

    path: str
    first: int
    count: int
    ops: tuple[PlannedOp, ...]
    weights: tuple[PlannedWeight, ...]
    groups: tuple[PlannedGroup, ...] = ()
    last: str = ""


@dataclass(frozen=True, kw_only=True)
class PlannedArrival:
    """A tensor that a piece receives from another stage: an input, or the gradient of an output. `piece`: the piece's first
    layer. `name`: "3:add", the layer that made it and its name there. `factors`: as in `PlannedInput`."""

    piece: int
    name: str
    gradient: bool
    factors: tuple[tuple[tuple[int, tuple[str, ...]], ...], ...]


@dataclass(frozen=True, kw_only=True)
class PlannedStage:
    """One pipeline stage. `pieces`: its model chunks, as (first layer, stop). `in_flight`: the most micro-batches of a chunk
    between their forward and their backward. `received`: layouts of tensors from other stages: "input", and "gradient" of an
    output, by layer number; `arrivals`: the same with their factors. `memory`: of one of its devices. `seconds`: busy time in a
    step, without the bubble."""

    pieces: tuple[tuple[int, int], ...]
    in_flight: int
    received: tuple[tuple[str, str], ...]
    memory: PlannedMemory
    seconds: float
    arrivals: tuple[PlannedArrival, ...] = ()
    source: Any = field(default=None, compare=False, repr=False)  # stage and solution, only in the process that planned it


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A 1F1B schedule, interleaved if stages have more than one chunk. `bubble`: mean share of a step in which a device is
    idle."""

    micro_batches: int
    stages: tuple[PlannedStage, ...]
    bubble: float

    @property
    def interleave(self) -> int:
        return len(self.stages[0].pieces)

    def lines(self) -> list[str]:
        """The schedule as text."""
        if len(self.stages) == 1:
            return [f"schedule  {self.micro_batches} micro-batches in sequence, with gradient accumulation"]
        how = "1F1B" if self.interleave == 1 else f"1F1B, interleaved: {self.interleave} pieces a stage"
        lines = [
            f"schedule  {len(self.stages)} stages, {self.micro_batches} micro-batches, {how}; devices wait {self.bubble:.1%}"
        ]
        for k, stage in enumerate(self.stages):
            layers = ", ".join(f"{first} to {stop - 1}" if stop - first > 1 else f"{first}" for first, stop in stage.pieces)
            peak = format_nbytes(stage.memory.peak_nbytes)
            lines.append(f"  stage {k:<4}layers {layers}; {stage.in_flight} in flight; peak {peak}; works {stage.seconds:.4g} s")
        return lines


@dataclass(frozen=True, kw_only=True)
class PlannedInput:
    """A tensor of the batch (of one micro-batch, where there are several). `factors`: each dim as a product, of which each factor
    has a size and the axes that split it; so each rank takes its part."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    factors: tuple[tuple[tuple[int, tuple[str, ...]], ...], ...]


@dataclass(frozen=True, kw_only=True)
class PlannedModel:
    """What was planned. `graph`: the fingerprint of the captured model, which is the same for another device, another version of
    torch and another attention kernel. `name` and `settings`: as on the command line, where the plan was made there."""

    graph: str
    torch: str
    name: str = ""
    settings: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A sharding plan. `gap`: proven optimality gap of the objective (the peak, the bytes held, or the seconds), relative;
    `seconds_gap`: the same for the seconds, with the first objective fixed. `bound_nbytes`: lower bound of the peak on this mesh
    with free per-layer choices (0: not computed). `held_nbytes`: all bytes that a device holds at some time of a step, each
    tensor counted once; with stages, their mean. "redundancy" minimises it. `late`: meshes without time for a search, on which
    only baselines were compared. With a `schedule` the mesh is that of one stage, and `memory` that of the stage with the largest
    peak. `reserve`: what the budget keeps free for the rest that a device needs; None if the budget was for live storages alone.

    >>> import scrimp
    >>> from scrimp import zoo
    >>> batch = zoo.example_batch("gpt-tiny", batch=8)
    >>> plan = scrimp.plan(zoo.build("gpt-tiny", layers=1), batch, "2xCPU", mesh="x=2", time_limit=1)
    >>> plan.save("plan.json")
    >>> scrimp.Plan.load("plan.json").memory == plan.memory
    True
    """

    mesh: Mesh
    cluster: str
    precision: str
    optimizer: str
    objective: str
    memory: PlannedMemory
    seconds: float
    gap: float
    seconds_gap: float
    layers: tuple[PlannedLayers, ...]
    model: PlannedModel = PlannedModel(graph="", torch="")
    batch: tuple[PlannedInput, ...] = ()
    bound_nbytes: int = 0
    held_nbytes: int = 0
    late: tuple[str, ...] = ()
    spent_seconds: float = 0.0
    whole: tuple[KeptWhole, ...] = ()
    schedule: Schedule | None = None
    reserve: PlannedReserve | None = None
    source: Any = field(default=None, compare=False, repr=False)  # problem and solution, only in the process that planned it

    @property
    def costly(self) -> tuple[KeptWhole, ...]:
        """The operators of `whole` worth a warning: those that hold more than `NOISE` of the peak while they run; and of the
        others the slowest, until the rest adds no more than `NOISE` to a step in all."""
        found, left = [], NOISE * self.seconds
        for each in sorted(self.whole, key=lambda each: each.seconds):
            left -= each.seconds
            if left < 0 or each.redundant_nbytes > NOISE * self.memory.peak_nbytes:
                found.append(each)
        return tuple(each for each in self.whole if each in found)

    @property
    def beside(self) -> tuple[ReservePart, ...]:
        """What a device needs beside the plan: what was reserved; else what its kind needs beside the peak, which no budget
        counts. Empty on CPUs."""
        if self.reserve is not None:
            return self.reserve.parts
        stages = 1 if self.schedule is None else len(self.schedule.stages)
        return Cluster.from_json(self.cluster).beside(self.memory.peak_nbytes, self.mesh, stages)

    def summary(self) -> str:
        lines = [
            f"mesh      {self.mesh}{' of each stage' if self.schedule and len(self.schedule.stages) > 1 else ''}",
            *(self.schedule.lines() if self.schedule else []),
            f"peak      {format_nbytes(self.memory.peak_nbytes)} a device, at {self.memory.where}; "
            f"{format_nbytes(self.memory.floor_nbytes)} if every byte were there once",
        ]
        lines += [
            f"  {kind.kind:<12}{format_nbytes(kind.nbytes):>12}"
            + (f", {format_nbytes(kind.redundant_nbytes)} of it replicated" if kind.redundant_nbytes else "")
            for kind in self.memory.kinds
        ]
        if self.beside:
            lines.append(f"beside    the plan, {self._counted()}: {', '.join(map(str, self.beside))}")
        if self.objective == "redundancy":
            lines.append(f"held      {format_nbytes(self.held_nbytes)} a device in a step, each tensor counted once")
        of = " of the bytes held" if self.objective == "redundancy" else ""
        lines += [
            f"step      {self.seconds:.4g} s",
            f"gap       {self.gap:.2%} proven{of}; {self.seconds_gap:.2%} of the seconds",
        ]
        if self.bound_nbytes:
            lines.append(f"bound     {format_nbytes(self.bound_nbytes)}: lower bound on this mesh, with free per-layer choices")
        if self.late:
            lines.append(
                f"time      was up before a search on {_and(self.late)}: only baselines were compared there; "
                "give a longer time_limit, or one mesh"
            )
        lines += [f"whole     {each}" for each in self.costly]
        return "\n".join(lines)

    def _counted(self) -> str:
        if self.reserve is None:
            return "not in its budget"
        budget, limit = format_nbytes(self.reserve.budget_nbytes), format_nbytes(self.reserve.limit_nbytes)
        return f"which may use {limit} of the budget of {budget}"

    def explain(self, name: str, *, time_limit: float = 20.0) -> Explanation:
        """Why a weight, an operator or a layer ("blocks.3.mlp.up.weight", "blocks.3.attention", "blocks.3") is sharded as it is:
        the choice, the next best choice and its price, and the bytes it holds at the peak. `time_limit`: seconds for the search
        of the next best."""
        from scrimp.planner.answers.explain import explain

        return explain(self, name, seconds=time_limit)

    def diff(self, other: Plan) -> Difference:
        """The differences from this plan to the other."""
        from scrimp.planner.answers.diff import diff

        return diff(self, other)

    def what_if(
        self, change: str | Cluster, *, time_limit: float = 60.0, gap: float = 0.01, progress: Callable[[str], None] | None = None
    ) -> Plan:
        """Plans again with another memory budget per device ("+2GiB", "-4GiB", "24GiB": minimises seconds within it), or on
        another cluster ("-1 node", "+2 nodes", "16xH100"). "+" and "-" are relative to the plan's peak, or to its budget if its
        objective was "time"."""
        from scrimp.planner.answers.what_if import what_if

        return what_if(self, change, time_limit=time_limit, gap=gap, progress=progress)

    def report(self, path: str | Path, *, time_limit: float = 20.0) -> None:
        """Write the plan as one HTML file: its figures, the layout of every layer, and, in the process that made the plan, the
        price of the next best choice for each kind of layer and the Pareto front. `time_limit`: seconds for these."""
        from scrimp.planner.answers.alternatives import alternatives
        from scrimp.report import Run, finite, write

        name = self.model.name or "plan"
        write(Run(name=name, plan=json.loads(self.to_json()), choices=finite(alternatives(self, time_limit))), path)

    def save(self, path: str | Path) -> None:
        Path(path).write_text(self.to_json())

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        return cls.from_json(Path(path).read_text())

    def to_json(self) -> str:
        from scrimp.planner.answers.plan_file import FORMAT, VERSION

        data = {name: value for name, value in asdict(self.bare()).items() if name not in ("mesh", "source")}
        if self.reserve is None:
            del data["reserve"]  # so that older readers can load it
        return json.dumps({"format": FORMAT, "version": VERSION, "mesh": str(self.mesh), **data})

    def bare(self) -> Plan:
        """Without the fields that only exist in the planning process."""
        schedule = self.schedule
        if schedule is not None:
            schedule = replace(schedule, stages=tuple(replace(stage, source=None) for stage in schedule.stages))
        return replace(self, source=None, schedule=schedule)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        from scrimp.planner.answers.plan_file import read

        return read(text)


def _and(meshes: tuple[str, ...]) -> str:
    return f"the mesh {meshes[0]}" if len(meshes) == 1 else f"{len(meshes)} meshes ({'; '.join(meshes)})"


def _star(axes: tuple[str, ...]) -> str:
    return "*".join(axes)
