"""Run folders for the tests, made by real engines."""

from __future__ import annotations

import json
from pathlib import Path

import scrimp
from scrimp import zoo


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
    return scrimp.plan(model, batch, "2xCPU", mesh="x=2", time_limit=2, **settings).to_json()  # type: ignore[arg-type]
