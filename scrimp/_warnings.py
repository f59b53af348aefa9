"""Warnings that point at the user's line, however deep in scrimp they arise."""

from __future__ import annotations

import contextlib
import functools
import sys
import warnings
from pathlib import Path
from types import FrameType

_OWN = (str(Path(__file__).parent), contextlib.__file__, functools.__file__)


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """As `warnings.warn`, at the nearest caller that is neither scrimp nor torch."""
    torch = getattr(sys.modules.get("torch"), "__path__", [])
    inner = (*_OWN, *torch)
    level = 2
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(inner):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level if frame is not None else 2)
