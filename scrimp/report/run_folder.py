"""A run folder: what a training run leaves for its report.

    run.json        settings, model, layers, ledgers; written when the run begins and when it ends
    machine.json    the machine and the versions of packages
    metrics.jsonl   one line per step (`metrics.py`)
    trace.json      one recorded step: bytes by kind at every operator, resident layers, what the schedule predicted
    bound.json      the last step against the least traffic and time
    plan.json       the plan that the run follows, if there is one
    rehearsal.json  a rehearsal's timeline, if somebody put one there

All but run.json may be absent. Every JSON file has a format name and a version.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scrimp.errors import PlanError, RunError, ScrimpError, check_format
from scrimp.report.files import read_json, replace_text
from scrimp.report.metrics import read_metrics
from scrimp.report.timeline import check_rehearsal, check_trace

VERSION = 1
REHEARSED, REHEARSED_VERSIONS = "scrimp.rehearsal", (1, 2)  # a report reads the timeline, which both have
RUN, MACHINE, TRACE, BOUND = "scrimp.run", "scrimp.run.machine", "scrimp.run.trace", "scrimp.run.bound"
FORMATS = {"run.json": RUN, "machine.json": MACHINE, "trace.json": TRACE, "bound.json": BOUND}
METRICS, PLAN, REHEARSAL = "metrics.jsonl", "plan.json", "rehearsal.json"
NEEDED = {
    RUN: ("began", "parameters", "layers", "settings"),
    MACHINE: ("versions",),
    TRACE: ("measured",),
    BOUND: ("seconds", "least_seconds"),
}


@dataclass(frozen=True, kw_only=True)
class Run:
    """Everything that a report shows of one run or of one plan. `name`: what a comparison calls it."""

    name: str
    run: Mapping[str, Any] | None = None
    machine: Mapping[str, Any] | None = None
    plan: Mapping[str, Any] | None = None
    trace: Mapping[str, Any] | None = None
    bound: Mapping[str, Any] | None = None
    rehearsal: Mapping[str, Any] | None = None
    metrics: tuple[Mapping[str, Any], ...] = ()
    choices: Mapping[str, Any] = field(default_factory=dict)  # prices of alternatives and the Pareto front of a plan

    def __post_init__(self) -> None:
        if self.plan is not None and self.run is not None:
            check_same_model(self.plan, self.run["parameters"], self.name)


class RunWriter:
    """Fills a run folder. A folder with other files, or with the run of another model, is refused."""

    def __init__(self, folder: str | Path, parameters: list[str], began: str) -> None:
        self.folder, self.began = Path(folder), began
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            there = sorted(path.name for path in self.folder.iterdir())
        except OSError as error:
            raise RunError(f"the run folder {folder} cannot be made: {error.strerror}; give another folder") from error
        if there and "run.json" not in there:
            raise RunError(f"{folder} is not a run folder: it has {there[0]} and no run.json; give an empty or a new folder")
        before = _known(self.folder / "run.json", RUN) if there else None
        if before is not None and before["parameters"] != parameters:
            raise RunError(f"{folder} holds the run of another model; give another folder")
        if before is not None:
            self.began = before["began"]  # a resumed run began then

    @property
    def metrics(self) -> Path:
        return self.folder / METRICS

    def write(self, name: str, data: Mapping[str, Any]) -> None:
        head = {"format": FORMATS[name], "version": VERSION}
        replace_text(self.folder / name, json.dumps(finite({**head, **data}), allow_nan=False) + "\n")

    def write_plan(self, text: str) -> None:
        replace_text(self.folder / PLAN, text)


def read_run(folder: str | Path) -> Run:
    """The run of a folder, or a clear error that names the file."""
    folder = Path(folder)
    if not (folder / "run.json").is_file():
        raise RunError(f"{folder} is not a run folder: it has no run.json; scrimp.Progress(engine, run='{folder}') writes one")
    found = {name: _known(folder / name, FORMATS[name]) for name in FORMATS if (folder / name).exists()}
    run = Run(
        name=folder.resolve().name,
        run=found["run.json"],
        machine=found.get("machine.json"),
        trace=found.get("trace.json"),
        bound=found.get("bound.json"),
        plan=read_plan(folder / PLAN) if (folder / PLAN).exists() else None,
        rehearsal=rehearsal_of(folder / REHEARSAL) if (folder / REHEARSAL).exists() else None,
        metrics=tuple(read_metrics(folder / METRICS)) if (folder / METRICS).exists() else (),
    )
    if run.trace is not None:
        check_trace(run.trace, len(found["run.json"]["layers"]), f"{folder / 'trace.json'}")
    return run


def read_plan(path: str | Path) -> dict[str, Any]:
    data = read_json(Path(path), "a plan file of scrimp", PlanError)
    try:
        check_format(data, "scrimp.plan", 2, PlanError)
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from error
    missing = [name for name in ("mesh", "memory", "seconds", "layers") if name not in data]
    if missing:
        raise PlanError(f"{path} is not a plan file of scrimp: it has no '{missing[0]}'")
    return data


def rehearsal_of(given: str | Path | Mapping[str, Any]) -> Mapping[str, Any]:
    """A rehearsal's data: of its file, or as they are."""
    path = Path(given) if isinstance(given, (str, Path)) else None
    data = given if isinstance(given, Mapping) else read_json(Path(given), "a rehearsal of scrimp")
    where = "the rehearsal" if path is None else str(path)
    try:
        check_format(data, REHEARSED, REHEARSED_VERSIONS, RunError)
    except RunError as error:
        raise RunError(f"{where}: {error}") from error
    check_rehearsal(data, where)
    return data


def read(path: str | Path) -> Run:
    """A run folder, or a plan file, whichever is there."""
    path = Path(path)
    if path.is_dir():
        return read_run(path)
    if not path.exists():
        raise RunError(f"there is no {path}: give a run folder or a plan file")
    return Run(name=path.stem, plan=read_plan(path))


def check_same_model(plan: Mapping[str, Any], parameters: list[str], name: str) -> None:
    known = {*parameters}
    strange = [each["name"] for layer in plan["layers"] for each in layer["weights"] if each["name"] not in known]
    if strange:
        raise PlanError(
            f"the plan is of another model than the run '{name}': it has the weight '{strange[0]}', which the run's "
            f"{len(known)} parameters do not have"
        )


@contextmanager
def intact(name: str) -> Iterator[None]:
    """Around code that reads fields of a run: a field that is missing, or of another type, is an error of the run's files."""
    try:
        yield
    except (KeyError, TypeError, IndexError, ValueError, AttributeError) as error:
        words = f"'{name}' is damaged: {type(error).__name__} {error}; its files are not as scrimp writes them"
        raise RunError(words) from error


def finite(data: Any) -> Any:
    """The same with null for numbers that JSON does not have."""
    if isinstance(data, Mapping):
        return {key: finite(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [finite(value) for value in data]
    if isinstance(data, float) and not -float("inf") < data < float("inf"):
        return None
    return data


def _known(path: Path, name: str) -> dict[str, Any]:
    data = read_json(path, "a file of a run folder")
    try:
        check_format(data, name, VERSION, RunError)
    except ScrimpError as error:
        raise RunError(f"{path}: {error}") from error
    missing = [key for key in NEEDED[name] if key not in data]
    if missing:
        raise RunError(f"{path} is damaged: it has no '{missing[0]}'")
    return data
