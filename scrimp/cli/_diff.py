"""`scrimp diff`: compares two plan files, without torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from scrimp.cli._end import typed
from scrimp.cli.render.table import print_words
from scrimp.errors import ScrimpError
from scrimp.planner import Plan

if TYPE_CHECKING:
    from rich.console import Console


def compare(console: Console, one: Path, other: Path) -> None:
    with typed():
        plans = _load(one), _load(other)
    print_words(console, plans[0].diff(plans[1]).text())


def _load(path: Path) -> Plan:
    try:
        return Plan.load(path)
    except (OSError, UnicodeDecodeError) as error:
        raise ScrimpError(f"{path} cannot be read: {error}") from error
    except ScrimpError as error:
        raise ScrimpError(f"{path}: {error}") from error
