"""Checks files that a command will read or write, before the work begins."""

from __future__ import annotations

import os
from pathlib import Path

from scrimp.errors import ScrimpError
from scrimp.planner import Plan


def check_writable(option: str, path: Path | None) -> None:
    """The folder must exist: a wrong `--out` must not cost minutes of search first."""
    if path is None:
        return
    folder = path.parent
    if path.is_dir():
        why = f"{path} is a folder; give the name of a file"
    elif not folder.is_dir():
        why = f"there is no folder {folder}; make it first (mkdir -p {folder}), or give another"
    elif not os.access(path if path.exists() else folder, os.W_OK):
        why = f"{path} cannot be written: permission denied"
    else:
        return
    raise ScrimpError(f"{option} {path}: {why}")


def write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise ScrimpError(f"{path} cannot be written: {error.strerror}") from error


def load_plan(path: Path) -> Plan:
    try:
        return Plan.load(path)
    except (OSError, UnicodeDecodeError) as error:
        raise ScrimpError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    except ScrimpError as error:
        raise ScrimpError(f"{path}: {error}") from error
