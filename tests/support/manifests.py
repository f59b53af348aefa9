"""Manifests of checkpoints that somebody has changed on purpose: their own checksum is right."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scrimp.checkpoint import _manifest


def rewritten(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = folder / "manifest.json"
    data = json.loads(path.read_text())
    del data["checksum"]
    change(data)
    path.write_text(json.dumps({**data, "checksum": _manifest._checksum(data)}))
