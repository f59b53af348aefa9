"""The console that commands print to."""

from __future__ import annotations

import os
import sys
from typing import Any

COLUMNS = 80  # where there is no terminal


def console(*, stderr: bool = False) -> Any:
    """A rich console that prints brackets as text: it would read layouts as markup."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    if hasattr(stream, "reconfigure"):
        stream.reconfigure(errors="replace")  # print a replacement for characters that cannot be encoded
    known = stream.isatty() or os.environ.get("COLUMNS", "").isdigit()
    return Console(stderr=stderr, markup=False, highlight=False, emoji=False, width=None if known else COLUMNS)
