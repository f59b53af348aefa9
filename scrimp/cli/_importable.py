"""Whether a module that a user names could be imported, found without importing it."""

from __future__ import annotations

import importlib.util
import sys

from scrimp.errors import ScrimpError


def importable(module: str, said: str) -> bool:
    """In this folder or among the installed ones. `said` is what the user wrote, for the error where looking itself fails."""
    sys.path.insert(0, "")
    try:
        return importlib.util.find_spec(module.partition(".")[0]) is not None
    except (ImportError, ValueError) as error:
        raise ScrimpError(f"{said}: {error}") from error
    finally:
        sys.path.remove("")
