"""`scrimp top`: reads a run folder again and again, and prints its last step. Torch is not loaded."""

from __future__ import annotations

import time
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scrimp.cli._end import typed
from scrimp.errors import RunError
from scrimp.report import Run, line_of, read
from scrimp.train import config_of

if TYPE_CHECKING:
    from rich.console import Console


def top(console: Console, folder: Path, *, once: bool, seconds: float) -> None:
    with typed():
        run = _run(folder)
    if once:
        console.print(_text(run, folder), soft_wrap=True)
        return
    shown = ""
    with console.status("") as status:
        while True:
            text = _text(run, folder)
            if console.is_terminal:
                status.update(text)
            elif text != shown:
                console.print(text, soft_wrap=True)
            shown = text
            if run.run is not None and run.run.get("ended"):
                break
            time.sleep(seconds)
            run = _run(folder)
    if console.is_terminal:
        console.print(shown, soft_wrap=True)
    console.print(f"the run ended at {run.run['ended'] if run.run is not None else ''}")


def _run(folder: Path) -> Run:
    if not folder.is_dir():
        raise RunError(f"there is no run folder {folder}")
    return read(folder)


def _text(run: Run, folder: Path) -> str:
    assert run.run is not None
    if not run.metrics:
        return f"{folder}: no step yet"
    return str(line_of(run.metrics, _steps(folder), run.run["settings"].get("device_nbytes")))


def _steps(folder: Path) -> int | None:
    """Of the whole run, if scrimp train wrote the folder."""
    try:
        data: dict[str, Any] = tomllib.loads(config_of(folder).read_text(encoding="utf-8"))
        return int(data["train"]["steps"])
    except (RunError, OSError, ValueError, KeyError):
        return None
