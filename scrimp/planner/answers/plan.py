"""What was planned: where every tensor of every operator is, what that takes, and how good it is at least."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scrimp.errors import LayoutError, PlanError, check_format
from scrimp.layout import Mesh
from scrimp.ledger import format_nbytes

if TYPE_CHECKING:
    from scrimp.cluster import Cluster
    from scrimp.planner.answers.diff import Difference
    from scrimp.planner.answers.explain import Explanation

FORMAT, VERSION = "scrimp.plan", 1
NOISE = 0.01  # of a plan's peak, or of its step: less is not worth a word


@dataclass(frozen=True, kw_only=True)
class Kind:
    """Bytes of a kind on a device at the peak, and how many of them other devices have too."""

    kind: str
    nbytes: int
    redundant_nbytes: int


@dataclass(frozen=True, kw_only=True)
class KeptWhole:
    """An operator without a rule, that every device runs whole, `times` over in a step; `where`: the first of them.
    `redundant_nbytes`: of what it reads and makes, on a device while it runs, what others have too, at most. `seconds`: by how
    much a step is longer than if every device did its share, with what is moved to where it runs."""

    target: str
    where: str
    times: int
    redundant_nbytes: int
    seconds: float

    def __str__(self) -> str:
        more = f" and {self.times - 1} more" if self.times > 1 else ""
        return (
            f"{self.target} ({self.where}{more}) has no rule, so every device runs all of it: while it runs a device has "
            f"{format_nbytes(self.redundant_nbytes)} that others have too, and a step is {self.seconds * 1e3:.3g} ms longer; "
            f"`scrimp rules discover {self.target}` may find a rule"
        )


@dataclass(frozen=True, kw_only=True)
class PlannedMemory:
    """Of a device. `where`: the operator that runs at the peak."""

    peak_nbytes: int
    kinds: tuple[Kind, ...]
    where: str

    @property
    def floor_nbytes(self) -> int:
        """What it would be if every byte of that moment were on one device alone."""
        return self.peak_nbytes - sum(kind.redundant_nbytes for kind in self.kinds)


@dataclass(frozen=True, kw_only=True)
class PlannedOp:
    """Layouts of an operator's tensors: as it needs them, and as it makes them. `saved`: what becomes of what its group saves
    for the backward, "keep", "recompute" or "offload"."""

    name: str
    target: str
    saved: str
    inputs: tuple[str, ...]
    outputs: tuple[str | None, ...]


@dataclass(frozen=True, kw_only=True)
class PlannedWeight:
    """`layout` while it is used; beyond that its weight, gradient and states are shared out over these axes at rest."""

    name: str
    layout: str
    weight_axes: tuple[str, ...]
    gradient_axes: tuple[str, ...]
    state_axes: tuple[str, ...]

    def __str__(self) -> str:
        """Its layout in use, and what is shared out beyond that."""
        axes = {"weight": self.weight_axes, "gradient": self.gradient_axes, "states": self.state_axes}
        if len({*axes.values()}) == 1:
            return f"{self.layout}{f', all over {_star(self.weight_axes)} at rest' if self.weight_axes else ''}"
        return ", ".join([self.layout, *(f"{what} over {_star(each)}" for what, each in axes.items() if each)])


@dataclass(frozen=True, kw_only=True)
class PlannedLayers:
    """`count` alike layers from `first` on, which is at `path`; `last`: the path of the last of them, where it is known."""

    path: str
    first: int
    count: int
    ops: tuple[PlannedOp, ...]
    weights: tuple[PlannedWeight, ...]
    last: str = ""


@dataclass(frozen=True, kw_only=True)
class PlannedStage:
    """`pieces`: of the model's layers, each from one to before another. `in_flight`: forwards through a piece whose backward is
    still to come, at the most. `received`: layouts of what comes from other stages: "input" and "gradient" of an output, by the
    number of the layer that has it. `memory`: of one of its devices. `seconds`: that it works in a step, without waiting."""

    pieces: tuple[tuple[int, int], ...]
    in_flight: int
    received: tuple[tuple[str, str], ...]
    memory: PlannedMemory
    seconds: float
    source: Any = field(default=None, compare=False, repr=False)  # the stage and its answer, where it was planned just now


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """One forward, one backward: interleaved if stages have more than one piece. `bubble`: the share of a step in which a device
    waits, on average."""

    micro_batches: int
    stages: tuple[PlannedStage, ...]
    bubble: float

    @property
    def interleave(self) -> int:
        return len(self.stages[0].pieces)

    def lines(self) -> list[str]:
        """To read."""
        if len(self.stages) == 1:
            return [f"schedule  {self.micro_batches} micro-batches one after the other, their gradients summed up"]
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
class Plan:
    """`gap`: by how much at most what was asked to be least could be less (the peak, the bytes held, or the seconds), as a
    part of it; `seconds_gap`: the same of the seconds, among plans that are as good in that. `bound_nbytes`: below
    which no plan on the mesh is, if every layer chose for itself (0: not asked). `held_nbytes`: of all that a device holds at
    some time of a step, each tensor counted once; with stages, on average. "redundancy" makes it least. `late`: meshes for which
    there was no time to search; known parallelisms were compared there. With a `schedule` the mesh is that of a stage, and
    `memory` that of the stage with the largest peak."""

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
    bound_nbytes: int = 0
    held_nbytes: int = 0
    late: tuple[str, ...] = ()
    spent_seconds: float = 0.0
    whole: tuple[KeptWhole, ...] = ()
    schedule: Schedule | None = None
    source: Any = field(default=None, compare=False, repr=False)  # the problem and its answer, where it was planned just now

    @property
    def costly(self) -> tuple[KeptWhole, ...]:
        """Of `whole` those that are worth a word: that have more than `NOISE` of the peak on a device while they run; and of the
        others so many that what is left takes no more than `NOISE` of a step, all together."""
        found, left = [], NOISE * self.seconds
        for each in sorted(self.whole, key=lambda each: each.seconds):
            left -= each.seconds
            if left < 0 or each.redundant_nbytes > NOISE * self.memory.peak_nbytes:
                found.append(each)
        return tuple(each for each in self.whole if each in found)

    def summary(self) -> str:
        lines = [
            f"mesh      {self.mesh}{' of each stage' if self.schedule and len(self.schedule.stages) > 1 else ''}",
            *(self.schedule.lines() if self.schedule else []),
            f"peak      {format_nbytes(self.memory.peak_nbytes)} a device, at {self.memory.where}; "
            f"{format_nbytes(self.memory.floor_nbytes)} if every byte were there once",
        ]
        lines += [
            f"  {kind.kind:<12}{format_nbytes(kind.nbytes):>12}"
            + (f", {format_nbytes(kind.redundant_nbytes)} of it elsewhere too" if kind.redundant_nbytes else "")
            for kind in self.memory.kinds
        ]
        if self.objective == "redundancy":
            lines.append(f"held      {format_nbytes(self.held_nbytes)} a device in a step, each tensor counted once")
        of = " of the bytes held" if self.objective == "redundancy" else ""
        lines += [
            f"step      {self.seconds:.4g} s",
            f"gap       {self.gap:.2%} at most{of}; of the seconds {self.seconds_gap:.2%}",
        ]
        if self.bound_nbytes:
            lines.append(
                f"bound     {format_nbytes(self.bound_nbytes)}: no plan on this mesh is below, chose each layer for itself"
            )
        if self.late:
            lines.append(
                f"time      it ended before a search on {_and(self.late)}: only known parallelisms were compared there; "
                "give a longer time_limit, or one mesh"
            )
        lines += [f"whole     {each}" for each in self.costly]
        return "\n".join(lines)

    def explain(self, name: str, *, time_limit: float = 20.0) -> Explanation:
        """Why a weight, an operator or a layer ("blocks.3.mlp.up.weight", "blocks.3.attention", "blocks.3") is as it is: what
        was chosen, the next best and its price, and what it holds at the peak. `time_limit`: seconds for the
        search of the next best."""
        from scrimp.planner.answers.explain import explain

        return explain(self, name, seconds=time_limit)

    def diff(self, other: Plan) -> Difference:
        """What the other one has not in common with this."""
        from scrimp.planner.answers.diff import diff

        return diff(self, other)

    def what_if(
        self, change: str | Cluster, *, time_limit: float = 60.0, gap: float = 0.01, progress: Callable[[str], None] | None = None
    ) -> Plan:
        """The plan with another budget of a device ("+2GiB", "-4GiB", "24GiB": the least seconds within it), or on another
        cluster ("-1 node", "+2 nodes", "16xH100"). "+" is more than it takes now, or than its budget if it was to be fast."""
        from scrimp.planner.answers.what_if import what_if

        return what_if(self, change, time_limit=time_limit, gap=gap, progress=progress)

    def save(self, path: str | Path) -> None:
        Path(path).write_text(self.to_json())

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        return cls.from_json(Path(path).read_text())

    def to_json(self) -> str:
        data = {name: value for name, value in asdict(self._bare()).items() if name not in ("mesh", "asked")}
        return json.dumps({"format": FORMAT, "version": VERSION, "mesh": str(self.mesh), **data})

    def _bare(self) -> Plan:
        """Without what only this process knows."""
        schedule = self.schedule
        if schedule is not None:
            schedule = replace(schedule, stages=tuple(replace(stage, source=None) for stage in schedule.stages))
        return replace(self, source=None, schedule=schedule)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        try:
            data = json.loads(text)
        except (json.JSONDecodeError, RecursionError) as error:
            raise PlanError(f"this is no plan as scrimp writes it: {error}") from error
        if not isinstance(data, dict):
            raise PlanError(f"this is no plan as scrimp writes it: it holds a {type(data).__name__}, not an object")
        check_format(data, FORMAT, VERSION, PlanError)
        try:
            made = cls._of_data(data)
            made.summary()  # what a wrong type would break
        except (KeyError, TypeError, ValueError, AttributeError, LayoutError) as error:
            raise PlanError(f"this is no plan as scrimp writes it: {type(error).__name__}: {error}") from error
        return made

    @classmethod
    def _of_data(cls, data: dict[str, Any]) -> Plan:
        del data["format"], data["version"]
        schedule = data.pop("schedule", None)
        return cls(
            mesh=Mesh.parse(data.pop("mesh")),
            memory=_memory(data.pop("memory")),
            schedule=None if schedule is None else _schedule(schedule),
            layers=tuple(_layers(layer) for layer in data.pop("layers")),
            whole=tuple(KeptWhole(**each) for each in data.pop("whole")),
            late=tuple(data.pop("late", ())),
            **data,
        )


def _and(meshes: tuple[str, ...]) -> str:
    return f"the mesh {meshes[0]}" if len(meshes) == 1 else f"{len(meshes)} meshes ({'; '.join(meshes)})"


def _star(axes: tuple[str, ...]) -> str:
    return "*".join(axes)


def _memory(data: Mapping[str, Any]) -> PlannedMemory:
    return PlannedMemory(
        peak_nbytes=data["peak_nbytes"], where=data["where"], kinds=tuple(Kind(**kind) for kind in data["kinds"])
    )


def _schedule(data: Mapping[str, Any]) -> Schedule:
    return Schedule(
        micro_batches=data["micro_batches"],
        bubble=data["bubble"],
        stages=tuple(
            PlannedStage(
                pieces=tuple((first, stop) for first, stop in stage["pieces"]),
                in_flight=stage["in_flight"],
                received=tuple((name, layout) for name, layout in stage["received"]),
                memory=_memory(stage["memory"]),
                seconds=stage["seconds"],
            )
            for stage in data["stages"]
        ),
    )


def _layers(data: Mapping[str, Any]) -> PlannedLayers:
    return PlannedLayers(
        path=data["path"],
        last=data.get("last", ""),
        first=data["first"],
        count=data["count"],
        ops=tuple(
            PlannedOp(
                name=op["name"], target=op["target"], saved=op["saved"], inputs=tuple(op["inputs"]), outputs=tuple(op["outputs"])
            )
            for op in data["ops"]
        ),
        weights=tuple(
            PlannedWeight(
                name=weight["name"],
                layout=weight["layout"],
                weight_axes=tuple(weight["weight_axes"]),
                gradient_axes=tuple(weight["gradient_axes"]),
                state_axes=tuple(weight["state_axes"]),
            )
            for weight in data["weights"]
        ),
    )
