"""Parses the shapes and settings of `scrimp rules` before torch is loaded."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

from scrimp.errors import ScrimpError
from scrimp.move import ITEMSIZE
from scrimp.train import importable, pairs

_SHAPE = re.compile(r"(scalar|[0-9]{1,18}(?:x[0-9]{1,18})*)(?::([a-z0-9_]+))?")


def shapes_of(text: str | None) -> list[tuple[tuple[int, ...], str]]:
    """Shapes and dtypes of tensors; the dtype is empty where none is given."""
    found = []
    for part in text.split(",") if text else []:
        match = _SHAPE.fullmatch(part.strip())
        if match is None:
            raise ScrimpError(f"--shapes {text}: '{part}' is not a shape; write 4x6,6x8, with a dtype 4x3:int64, or scalar")
        if match[2] is not None and match[2] not in ITEMSIZE:
            near = get_close_matches(match[2], ITEMSIZE, 3)
            hint = f"; did you mean {' or '.join(near)}?" if near else f"; there are {', '.join(ITEMSIZE)}"
            raise ScrimpError(f"--shapes {text}: torch has no dtype '{match[2]}'{hint}")
        sizes = () if match[1] == "scalar" else tuple(map(int, match[1].split("x")))
        found.append((sizes, match[2] or ""))
    return found


def literals_of(settings: Sequence[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs(settings, "dim=1"):
        try:
            read = ast.literal_eval(value)
        except (SyntaxError, ValueError, MemoryError, RecursionError):
            read = value
        found[name] = tuple(read) if isinstance(read, list) else read
    return found


def check_modules(names: Sequence[str]) -> None:
    """The modules of --load must be importable."""
    for name in names:
        if not all(part.isidentifier() for part in name.split(".")):
            raise ScrimpError(f"--load {name}: give the name of a Python module, such as my_operators")
        if not importable(name, f"--load {name}"):
            raise ScrimpError(f"--load {name}: No module named '{name}' in this folder or among the installed ones")
