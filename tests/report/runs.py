"""Run folders for the tests, made by real engines."""

from __future__ import annotations

import json
from pathlib import Path

import scrimp
from scrimp import zoo
from scrimp.engine.observe.run_data import run_data, trace_data
from scrimp.move import received_nbytes
from scrimp.report import Run
from scrimp.report.run_view import curves, difference


def trained(folder: Path, *, steps: int = 12, layers: int = 2, memory: scrimp.Memory | None = None, **settings: object) -> Path:
    """A run of gpt-tiny in little memory: some layers on the device, others on disk."""
    disk = folder.parent / "disk"
    disk.mkdir(exist_ok=True)
    memory = memory or scrimp.Memory(device="700KiB", host="300KiB", disk=disk)
    engine = scrimp.Engine(zoo.build("gpt-tiny", layers=layers), memory=memory, device="cpu", **settings)  # type: ignore[arg-type]
    with engine, scrimp.Progress(engine, run=folder, quiet=True) as progress:
        for step in range(steps):
            progress.update(engine.step(*zoo.example_batch("gpt-tiny", batch=8, step=step)), tokens=8 * 32)
    return folder


def longer(folder: Path, steps: int) -> None:
    """As if the run had gone on for so many steps: its last line again and again, with other numbers."""
    path = folder / "metrics.jsonl"
    rows = scrimp.read_metrics(path)
    for step in range(len(rows), steps):
        last = rows[-1]
        rows.append({**last, "step": step, "loss": 3 + 2 / (1 + step), "seconds": last["seconds"] * (1 + step % 7 / 100)})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def plan_text(**settings: object) -> str:
    model, batch = zoo.build("gpt-tiny"), zoo.example_batch("gpt-tiny", batch=8)
    return scrimp.plan(model, batch, "2xCPU", mesh="x=2", time_limit=2, precision="fp32", **settings).to_json()  # type: ignore[arg-type]


def rehearsal(points: int = 5) -> dict[str, object]:
    kinds = {"parameters": [100] * points, "activations": [10 * k for k in range(points)]}
    return {
        "format": "scrimp.rehearsal", "version": 1, "points": [f"blocks.{k} aten.mm" for k in range(points)], "kinds": kinds,
        "peak": {"nbytes": 100 + 10 * (points - 1)}, "step_seconds": 0.25,
    }  # fmt: skip


def recorded(folder: str, name: str, steps: int, rows: int, plan: str | None, settings: dict[str, object]) -> tuple[int, float]:
    """Runs on each rank: train, and return the bytes that this rank received and the largest error of the predicted timeline."""
    engine = scrimp.Engine(zoo.build(name), device="cpu", plan=None if plan is None else scrimp.Plan.from_json(plan), **settings)  # type: ignore[arg-type]
    before = received_nbytes()
    with engine, scrimp.Progress(engine, run=folder, quiet=True) as progress:
        for step in range(steps):
            number = step if plan is not None else step * engine._run.wire.world + engine._run.wire.rank
            progress.update(engine.step(*zoo.example_batch(name, batch=rows, step=number)))
        received = received_nbytes() - before
        trace = trace_data(engine._run)
        assert trace is not None
        run = Run(name="run", run=run_data(engine._run, "", ""), trace=trace)
        measured, predicted = curves(run)
        assert measured is not None
        assert predicted is not None
        return received, difference(measured, predicted)[0]
