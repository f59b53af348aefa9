"""Reads JSON files with clear errors, and writes files whole or not at all."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from scrimp.errors import RunError, ScrimpError


def replace_text(path: Path, text: str, error: type[ScrimpError] = RunError) -> None:
    """Write a file atomically: under another name in the same folder, which then becomes its own. If that fails, the old file
    is as it was."""
    new = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        with new.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    except OSError as trouble:
        raise error(f"{path} cannot be written: {trouble.strerror}; give a file in a folder that exists") from trouble
    finally:
        with suppress(OSError):
            new.unlink()  # where it did not become the file


def read_json(path: Path, what: str, error: type[ScrimpError] = RunError) -> dict[str, Any]:
    """A JSON object; otherwise the error says what is wrong with the file."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as trouble:
        reason = trouble.strerror if isinstance(trouble, OSError) else "it is not text"
        raise error(f"{path} cannot be read as {what}: {reason}") from trouble
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as trouble:
        where = f", of {len(text)} characters" if isinstance(trouble, json.JSONDecodeError) else ""
        raise error(f"{path} is not {what}, or it is truncated: {trouble}{where}") from trouble
    if not isinstance(data, dict):
        raise error(f"{path} is not {what}: it holds a {type(data).__name__}, not an object")
    return data
