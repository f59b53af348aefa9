"""The folder of scrimp's cache: of kernels that it built, and of graphs that it captured."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """`XDG_CACHE_HOME`, or .cache in the user's home directory. Raises `RuntimeError` if the user has none."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(given) if os.path.isabs(given) else Path.home() / ".cache") / "scrimp"
