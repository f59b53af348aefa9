"""Checks whether a module named by the user can be imported, without importing it."""

from __future__ import annotations

import importlib.util
import sys

from scrimp.errors import ScrimpError


def importable(module: str, said: str) -> bool:
    """Searches this folder and the installed packages. `said`: the user's text, for the error if the search itself fails."""
    sys.path.insert(0, "")
    try:
        return importlib.util.find_spec(module.partition(".")[0]) is not None
    except (ImportError, ValueError) as error:
        raise ScrimpError(f"{said}: {error}") from error
    finally:
        sys.path.remove("")
