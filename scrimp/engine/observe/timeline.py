"""Memory over the points of a step under a plan: by kind, at the instant within each point at which most is live.

A point is a step of the lowered program: an operator, a move, a gather, a reduction. The point "before" a layer's pass has what
happens between two passes: sums of gradients that reach one value, weights that are gathered again after an update, what a
pipeline stage receives and sends. The last point is the optimizer update. All but kernel workspace is counted, so that the
largest point is the ledger's `live_peak`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

from scrimp.chunks import Meter
from scrimp.ledger import Ledger, Snapshot
from scrimp.lower import Ahead, Behind, Generated, LoweredLayer, described

if TYPE_CHECKING:
    from scrimp.engine._engine import Engine

AFTER, UPDATE = "after backward", "update"


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """`kinds`: the bytes of each kind by point; kinds without bytes are left out."""

    points: tuple[str, ...]
    kinds: dict[str, tuple[int, ...]]

    @cached_property
    def totals(self) -> tuple[int, ...]:
        return tuple(map(sum, zip(*self.kinds.values(), strict=True)))


class Recorder:
    """Records a timeline from a ledger. `passed` is called with the number of each point when it ends."""

    def __init__(self, ledger: Ledger, meter: Meter, passed: Callable[[int], None] = lambda _: None) -> None:
        self._ledger, self._meter, self._passed = ledger, meter, passed
        self._points: list[tuple[LoweredLayer, Ahead | Behind, int] | str] = []
        self.peaks: list[tuple[Snapshot, Snapshot]] = []  # of each point, with and without workspace

    def begin(self) -> None:
        """A new timeline."""
        self._points.clear()
        self.peaks.clear()
        self._meter.settle()
        self._ledger.reset_peak()

    def watch(self, _: Generated, layer: LoweredLayer, program: Ahead | Behind, number: int) -> None:
        self._end((layer, program, number))

    def end(self, name: str) -> None:
        """The end of a point that is no step of a program."""
        self._end(name)

    def _end(self, point: tuple[LoweredLayer, Ahead | Behind, int] | str) -> None:
        self._meter.settle()
        self._points.append(point)
        self.peaks.append((self._ledger.peak, self._ledger.live_peak))
        self._ledger.reset_peak()
        self._passed(len(self._points) - 1)

    def timeline(self) -> Timeline:
        names: dict[tuple[str, int, int], str] = {}
        points = []
        for point in self._points:
            if not isinstance(point, str):
                layer, program, number = point
                key = (layer.path, id(program), number)
                point = names[key] = names.get(key) or _said(layer, program, number)
            points.append(point)
        rows = [dict(each.by_kind) for _, each in self.peaks]
        kinds = [kind for kind in self._ledger.now if any(row.get(kind) for row in rows)]
        return Timeline(points=tuple(points), kinds={kind: tuple(row.get(kind, 0) for row in rows) for kind in kinds})


def _said(layer: LoweredLayer, program: Ahead | Behind, number: int) -> str:
    where = f"{layer.path or 'the model itself'}, {'forward' if isinstance(program, Ahead) else 'backward'}"
    if number < 0:
        return f"before {where}"
    step = program.steps[number]
    target = layer.chosen.ops[step.op].op.target if hasattr(step, "op") else ""
    return f"{where}, {target or described(step, layer.names)}"


class Points(Protocol):
    """Hears of the points of a step, in order: `Recorder`, or a rehearsal's clock."""

    def begin(self) -> None: ...

    def watch(self, _: Generated, layer: LoweredLayer, program: Ahead | Behind, number: int) -> None: ...

    def end(self, name: str) -> None: ...


@contextmanager
def watching(runners: Iterable[Generated], points: Points) -> Iterator[None]:
    """Inside, every step of the program ends a point."""
    runners = [*runners]
    points.begin()
    for runner in runners:
        runner.watch = points.watch
    try:
        yield
    finally:
        for runner in runners:
            runner.watch = None


@contextmanager
def recording(engine: Engine) -> Iterator[Recorder]:
    """`with recording(engine) as recorder:` records memory over the points of the steps inside, of an engine under a plan.
    `recorder.timeline()` has it afterwards; `scrimp.rehearse` predicts the same. The ledger's peaks are then those of all steps
    again."""
    run = engine._run
    ledger, runners = run.ledger.device, run.under_plan.runners
    peaks, recorder = [(ledger.peak, ledger.live_peak)], Recorder(ledger, run.meter)
    run.recorder = recorder
    try:
        with watching(runners, recorder):
            yield recorder
    finally:
        run.recorder = None
        peaks += recorder.peaks
        ledger.peak, ledger.live_peak = (max(each, key=lambda peak: peak.nbytes) for each in zip(*peaks, strict=True))
