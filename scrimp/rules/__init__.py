"""How each operator may be split over a mesh, and the proof."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from scrimp.rules._follow import follow
from scrimp.rules._rule import FREE, INSIDE, SUM, WHOLE, Dims, Factor, Rule, Talk
from scrimp.rules._split import Split, Sums, choices, factored_shape, fits, layouts, may_split, refine, simplest

if TYPE_CHECKING:
    from scrimp.rules._check import check
    from scrimp.rules._discover import discover
    from scrimp.rules._known import known_targets, learn, rule_of
    from scrimp.rules._localize import localize

__all__ = [
    "FREE", "INSIDE", "SUM", "WHOLE", "Dims", "Factor", "Rule", "Split", "Sums", "Talk", "check", "choices", "discover",
    "factored_shape", "fits", "follow", "known_targets", "layouts", "learn", "localize", "may_split", "refine", "rule_of",
    "simplest",
]  # fmt: skip

_WITH_TORCH = {
    "check": "_check",
    "discover": "_discover",
    "known_targets": "_known",
    "learn": "_known",
    "rule_of": "_known",
    "localize": "_localize",
}


def __getattr__(name: str) -> Any:
    """Rules are data and need no torch; knowing them by operator does."""
    if name in _WITH_TORCH:
        return getattr(import_module(f"scrimp.rules.{_WITH_TORCH[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
