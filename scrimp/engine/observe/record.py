"""Fills a run folder while an engine trains; and the report of an engine. Only rank 0 writes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scrimp._warnings import warn
from scrimp.engine.observe.bound import bound
from scrimp.engine.observe.run_data import bound_data, machine_data, run_data, trace_data
from scrimp.errors import RunError
from scrimp.report import Run, RunWriter, finite, read_metrics, rehearsal_of, write

if TYPE_CHECKING:
    from scrimp.engine._training import Training


class Recorder:
    """Writes settings and machine at once, a trace as soon as a step followed a schedule, and all of it again at the end. If the
    disk fails in between, the training goes on."""

    def __init__(self, engine: Training, folder: str | Path) -> None:
        self.engine = engine
        self.folder = engine.run_folder = RunWriter(folder, [*engine.weights], _now())
        self._traced = False
        self.folder.write("run.json", run_data(engine, self.folder.began, None))
        self.folder.write("machine.json", machine_data(engine.device))
        if engine.plan is not None:
            self.folder.write_plan(engine.plan.to_json())

    def step(self) -> None:
        if self._traced:
            return
        trace = trace_data(self.engine)
        if trace is not None and trace["predicted"] is not None:
            self._traced = True
            self._try("trace.json", trace)

    def close(self, *, measure: bool = True) -> None:
        """`measure`: also write the bound, which measures the machine, once per process, for up to three seconds."""
        engine = self.engine
        self._try("run.json", run_data(engine, self.folder.began, _now()))
        trace = trace_data(engine)
        if trace is not None:
            self._try("trace.json", trace)
        found = _bound(engine) if measure else None
        if found is not None:
            self._try("bound.json", found)

    def _try(self, name: str, data: Mapping[str, Any]) -> None:
        try:
            self.folder.write(name, data)
        except RunError as error:
            warn(f"{error}; the run folder lacks this file, and training goes on")


def report(engine: Training, path: str | Path, rehearsal: str | Path | Mapping[str, Any] | None) -> None:
    if engine.wire.rank != 0 or engine.group.outside:
        return
    folder = engine.run_folder
    run = Run(
        name=type(engine.model).__name__,
        run=finite(run_data(engine, folder.began if folder is not None else _now(), _now())),
        machine=machine_data(engine.device),
        plan=None if engine.plan is None else json.loads(engine.plan.to_json()),
        trace=trace_data(engine),
        bound=finite(_bound(engine)),
        rehearsal=None if rehearsal is None else rehearsal_of(rehearsal),
        metrics=tuple(read_metrics(folder.metrics)) if folder is not None and folder.metrics.exists() else (),
    )
    write(run, path)


def _bound(engine: Training) -> dict[str, Any] | None:
    plan = engine.planning.current
    if engine.closed or plan is None or plan.choice is None or not engine.seconds:
        return None  # there was no step with a schedule
    return bound_data(bound(engine))


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
