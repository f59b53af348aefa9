"""The hook behind `Cluster.probe`: a package above this one registers its measuring function here."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from scrimp.cluster._machine import Machine
from scrimp.errors import ScrimpError

Measure = Callable[[str | None, str | Path | None], Machine]
DEFAULT = "scrimp.engine"  # loaded at the first probe; it registers its own probe

_measure: Measure | None = None


def register_measure(measure: Measure) -> None:
    """From now on `Cluster.probe` calls `measure(device, disk)`."""
    global _measure
    _measure = measure


def measure(device: str | None, disk: str | Path | None) -> Machine:
    """This machine's rates, by the registered function."""
    if _measure is None:
        import_module(DEFAULT)
    if _measure is None:
        raise ScrimpError(f"no measuring function is registered: {DEFAULT} did not call scrimp.cluster.register_measure")
    return _measure(device, disk)
