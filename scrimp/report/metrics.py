"""The metrics file: one JSON object per line, exactly one line per step.

A run that resumes from a checkpoint repeats some steps: their old lines are dropped. A killed run may leave half a line at the
end: it is dropped too.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from math import isfinite
from pathlib import Path
from typing import Any

from scrimp._warnings import warn
from scrimp.errors import RunError
from scrimp.report.files import replace_text


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The lines of a metrics file, half a line at its end left out. A loss that was not finite reads as None.

    >>> import scrimp
    >>> from pathlib import Path
    >>> _ = Path("run.jsonl").write_text('{"step": 0, "loss": 4.25}')
    >>> scrimp.read_metrics("run.jsonl")
    [{'step': 0, 'loss': 4.25}]
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise RunError(f"the metrics file {path} cannot be read: {error.strerror}") from error
    *lines, last = data.split(b"\n")
    rows = [_row(line, f"{path}, line {number}") for number, line in enumerate(lines, 1) if line]
    last = last.strip(b"\0")  # some file systems pad a truncated line with zeros
    if last:
        try:
            rows.append(_row(last, f"{path}, line {len(lines) + 1}"))
        except RunError:
            if not last.startswith(b"{") or last.endswith(b"}"):
                raise
    return rows


class MetricsFile:
    """Appends to a metrics file. `step` is the first step to write: existing lines from it on are of an earlier attempt."""

    def __init__(self, path: str | Path, step: int) -> None:
        self.path = Path(path)
        self._next = step
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.touch()
            self._open(step)
        except OSError as error:
            raise RunError(f"the metrics file {path} cannot be written: {error.strerror}") from error

    def write(self, row: Mapping[str, Any]) -> None:
        """Append a row with its step. A failing disk stops the file, not the training."""
        if self._file.closed:
            return
        try:
            if row["step"] < self._next:  # the engine went back to a checkpoint
                self.close()
                self._open(row["step"])
            self._file.write(_line(row))
            self._file.flush()
            self._next = row["step"] + 1
        except (OSError, RunError) as error:
            warn(f"step {row['step']}: {self.path}: {error}; no more metrics are written")
            self.close()

    def close(self) -> None:
        with suppress(OSError):  # `write` has already warned
            self._file.close()

    def _open(self, step: int) -> None:
        kept = [row for row in read_metrics(self.path) if row["step"] < step]
        self._replace(kept)
        self._file = self.path.open("a")

    def _replace(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Rewrite the file atomically, unless nothing would change."""
        text = "".join(map(_line, rows))
        if text.encode() == self.path.read_bytes():
            return
        replace_text(self.path, text)


def _line(row: Mapping[str, Any]) -> str:
    """A row as JSON. NaN is written as null, because other JSON readers do not know NaN."""
    finite = {key: None if isinstance(value, float) and not isfinite(value) else value for key, value in row.items()}
    return json.dumps(finite, allow_nan=False) + "\n"


def _row(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError:
        row = None
    if not isinstance(row, dict) or not isinstance(row.get("step"), int):
        raise RunError(f"{where}: {line[:60]!r} is no line of a metrics file, which is a JSON object with a 'step'")
    return row
