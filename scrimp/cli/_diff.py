"""`scrimp diff`: compares two plan files, without torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from scrimp.cli._end import typed
from scrimp.cli._files import load_plan
from scrimp.cli.render.table import print_words

if TYPE_CHECKING:
    from rich.console import Console


def compare(console: Console, one: Path, other: Path) -> None:
    with typed():
        plans = load_plan(one), load_plan(other)
    print_words(console, plans[0].diff(plans[1]).text())
