"""Probes that measure too little to say anything about a machine, so that tests of them are short."""

from __future__ import annotations

import pytest

from scrimp.engine.schedule import operator_probe
from scrimp.engine.schedule.operator_probe import Sizes

SMALL = Sizes(rows=(16, 32, 64), tokens=(16, 32), heads=2, pixels=(7, 14), numel=(1 << 8, 1 << 11), width=64)


def hurry_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every class of operators, at small sizes, once each."""
    for name, value in {"CPU": SMALL, "SECONDS_CPU": 0.0, "BEST_OF": 1, "CACHE_NBYTES": 1 << 16}.items():
        monkeypatch.setattr(operator_probe, name, value)
