"""How each operator may be split over a mesh, and the proof."""

from scrimp.rules._check import check
from scrimp.rules._discover import discover
from scrimp.rules._known import known_targets, rule_of
from scrimp.rules._localize import localize
from scrimp.rules._rule import FREE, INSIDE, SUM, WHOLE, Dims, Factor, Rule, Talk
from scrimp.rules._split import Split, Sums, choices, factored_shape, fits, layouts, may_split, refine

__all__ = [
    "FREE",
    "INSIDE",
    "SUM",
    "WHOLE",
    "Dims",
    "Factor",
    "Rule",
    "Split",
    "Sums",
    "Talk",
    "check",
    "choices",
    "discover",
    "factored_shape",
    "fits",
    "known_targets",
    "layouts",
    "localize",
    "may_split",
    "refine",
    "rule_of",
]
