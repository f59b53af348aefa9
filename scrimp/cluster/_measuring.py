"""The hook behind `Cluster.probe`: a package above this one registers its measuring function here."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from scrimp.cluster._machine import Machine
from scrimp.cluster._operators import Operators
from scrimp.cluster._reserve import Reserve
from scrimp.errors import ScrimpError

Measure = Callable[[str | None, str | Path | None], Machine]
MeasureOperators = Callable[[str | None], Operators]
MeasureReserve = Callable[[str | None], Reserve | None]
DEFAULT = "scrimp.engine"  # loaded at the first probe; it registers its own probe

_measure: tuple[Measure, MeasureOperators, MeasureReserve] | None = None


def register_measure(measure: Measure, operators: MeasureOperators, reserve: MeasureReserve) -> None:
    """From now on `Cluster.probe` calls `measure(device, disk)`, and `operators(device)` and `reserve(device)` if it shall
    measure those."""
    global _measure
    _measure = measure, operators, reserve


def measure(device: str | None, disk: str | Path | None) -> Machine:
    """This machine's rates, by the registered function."""
    return _registered()[0](device, disk)


def measure_operators(device: str | None) -> Operators:
    return _registered()[1](device)


def measure_reserve(device: str | None) -> Reserve | None:
    return _registered()[2](device)


def _registered() -> tuple[Measure, MeasureOperators, MeasureReserve]:
    if _measure is None:
        import_module(DEFAULT)
    if _measure is None:
        raise ScrimpError(f"no measuring function is registered: {DEFAULT} did not call scrimp.cluster.register_measure")
    return _measure
