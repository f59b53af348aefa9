"""How an operator may be split: its dims, as products of factors.

    mm      i k, k j -> i j         k is summed: a split gives every member a part of the sum
    view    (a b) c -> a (b c)      a dim that is cut up, or made of several, is a product, the major factor first

An axis of the mesh splits one factor or none; with that the layouts of all operands are known. A rule serves the costs, the
memory and the program alike, and `proof/check.py` proves it by numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

FREE, SUM, WHOLE, INSIDE = "free", "sum", "whole", "inside"


@dataclass(frozen=True, kw_only=True)
class Factor:
    """`kind`: "free": may be split; outputs without it are then alike on all members. "sum": may be split; outputs without it
    are then parts of a sum. "whole": must not be split. "inside": may be split, and members then talk within the operator
    (`Talk`); outputs without it are complete. `ranged`: members reckon with where theirs begins, so that each must hold a
    range: the factor cannot be taken for a product (`refine`)."""

    size: int
    kind: str = FREE
    ranged: bool = False


@dataclass(frozen=True, kw_only=True)
class Talk:
    """An all-reduce inside of an operator where a factor is split: of a tensor with these factors (those which the operand has
    whose elements travel), of so many bytes each, `times` over."""

    factor: int
    of: tuple[int, ...]
    itemsize: int
    times: int = 1


Dims = tuple[tuple[int, ...], ...]  # of a tensor: of each dim its factors by index, major first; none: a dim of size 1


@dataclass(frozen=True, kw_only=True)
class Rule:
    """`inputs`: of each tensor among the arguments, in order; `outputs`: of each output, None where it is no tensor.
    `linear`: sets of inputs that may be parts of a sum, all those of a set alike; outputs then are too."""

    factors: tuple[Factor, ...]
    inputs: tuple[Dims, ...]
    outputs: tuple[Dims | None, ...]
    linear: tuple[frozenset[int], ...] = ()
    talks: tuple[Talk, ...] = ()
