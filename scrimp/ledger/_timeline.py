"""A timeline: the bytes of one step by kind, point by point.

A point is an operator in a schedule step; its bytes are those at its highest total. Where no operator is known, as on CUDA,
a schedule step has two points: the fetch of its layers, and the rest. `Recording` makes a timeline from the charges of a ledger.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from scrimp.ledger._ledger import Ledger

FETCH, RUN = "fetch", "run"  # what a schedule step does, where no operator is known


@dataclass(frozen=True, kw_only=True)
class Point:
    """`schedule_step`: its number in the step. `phase`: forward or backward, which may begin within a schedule step. `operator`:
    what ran. `seconds`: since the step began."""

    schedule_step: int
    phase: str
    operator: str
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One schedule step: the phase in which it began, the layers that it needs, and all layers on the device in it."""

    phase: str
    layers: tuple[int, ...]
    resident: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """`kinds`: for each kind that ever has bytes, its bytes at every point."""

    step: int
    points: tuple[Point, ...]
    kinds: Mapping[str, tuple[int, ...]]
    stages: tuple[Stage, ...]

    @property
    def totals(self) -> list[int]:
        return [sum(column) for column in zip(*self.kinds.values(), strict=True)]

    def to_data(self) -> dict[str, Any]:
        """For JSON: operators are numbered, because most of them occur often."""
        operators = {name: k for k, name in enumerate(dict.fromkeys(point.operator for point in self.points))}
        phases = {name: k for k, name in enumerate(dict.fromkeys(point.phase for point in self.points))}
        return {
            "step": self.step,
            "phases": [*phases],
            "operators": [*operators],
            "points": [[p.schedule_step, phases[p.phase], operators[p.operator], round(p.seconds, 6)] for p in self.points],
            "kinds": {kind: [*column] for kind, column in self.kinds.items()},
            "schedule_steps": [
                {"phase": stage.phase, "layers": [*stage.layers], "resident": [*stage.resident]} for stage in self.stages
            ],
        }


@dataclass
class Recording:
    """Collects the points of a step. The ledger calls `saw` after each charge, the engine `enter` at each schedule step and
    `phase` where it changes, and a meter that knows operators sets `operator`."""

    step: int
    operator: str = ""
    phase: str = ""
    _at: int = -1
    _began: float = field(default_factory=perf_counter)
    _points: list[Point] = field(default_factory=list)
    _rows: list[tuple[int, ...]] = field(default_factory=list)
    _stages: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)
    _residents: list[tuple[int, ...]] = field(default_factory=list)
    _key: tuple[int, str, str] | None = None
    _total: int = 0

    def enter(self, phase: str, layers: tuple[int, ...]) -> None:
        self._at += 1
        self.operator, self.phase = FETCH, phase
        self._stages.append((phase, layers))
        self._residents.append(layers)

    def hold(self, resident: Sequence[bool]) -> None:
        """The layers that are resident now, after the fetches of this schedule step."""
        self._residents[-1] = tuple(k for k, there in enumerate(resident) if there)
        self.operator = RUN

    def saw(self, ledger: Ledger) -> None:
        key = self._at, self.phase, self.operator
        if self._at < 0 or (key == self._key and ledger.total_nbytes <= self._total):
            return
        row = tuple(ledger.now.values())
        self._total = ledger.total_nbytes
        if key == self._key:
            self._rows[-1] = row
            return
        self._key = key
        seconds = perf_counter() - self._began
        self._points.append(Point(schedule_step=self._at, phase=self.phase, operator=self.operator, seconds=seconds))
        self._rows.append(row)

    def timeline(self, kinds: Sequence[str]) -> Timeline:
        """What was seen. `kinds`: those of the ledger, in its order."""
        columns = dict(zip(kinds, zip(*self._rows, strict=True), strict=True)) if self._rows else {}
        stages = (
            Stage(phase=phase, layers=layers, resident=resident)
            for (phase, layers), resident in zip(self._stages, self._residents, strict=True)
        )
        return Timeline(
            step=self.step,
            points=tuple(self._points),
            kinds={kind: column for kind, column in columns.items() if any(column)},
            stages=tuple(stages),
        )
