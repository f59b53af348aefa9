"""A sharding rule: an operator's dims as products of factors, and which of them may be split.

    mm      i k, k j -> i j         k is summed: a split leaves a partial sum on every member
    view    (a b) c -> a (b c)      a dim that is split up, or merged, is a product, the major factor first

A mesh axis splits one factor or none; that fixes the layouts of all operands. The planner's costs, its memory model and the
sharded program use the same rule, and `proof/check.py` checks it numerically.
"""

from __future__ import annotations

from dataclasses import dataclass

FREE, SUM, WHOLE, INSIDE = "free", "sum", "whole", "inside"


@dataclass(frozen=True, kw_only=True)
class Factor:
    """`kind`: "free": may be split; outputs without it are then replicated. "sum": may be split; outputs without it are then
    partial sums. "whole": must not be split. "inside": may be split, with communication within the operator (`Talk`); outputs
    without it are complete. `ranged`: the operator needs the start of the shard, so that each member must hold a contiguous
    range: the factor cannot be split into a product (`refine`)."""

    size: int
    kind: str = FREE
    ranged: bool = False


@dataclass(frozen=True, kw_only=True)
class Talk:
    """An all-reduce inside an operator where a factor is split: of a tensor with these factors, of so many bytes per element,
    `times` over."""

    factor: int
    of: tuple[int, ...]
    itemsize: int
    times: int = 1


@dataclass(frozen=True, kw_only=True)
class Scratch:
    """Tensors with the factors `of` that an operator holds while it runs, beyond its inputs and outputs, where one of the factors
    `when` is split: of so many bytes per element, `times` over. `traffic`: how many times over it reads or writes such a tensor,
    beyond inputs and outputs."""

    when: tuple[int, ...]
    of: tuple[int, ...]
    itemsize: int
    times: int = 1
    traffic: int = 0


Dims = tuple[tuple[int, ...], ...]  # of each dim of a tensor its factors by index, major first; none: a dim of size 1


@dataclass(frozen=True, kw_only=True)
class Rule:
    """`inputs`: dims of each tensor among the arguments, in order; `outputs`: of each output, None where it is no tensor.
    `linear`: sets of inputs that may be partial sums, all those of a set together; outputs then are too."""

    factors: tuple[Factor, ...]
    inputs: tuple[Dims, ...]
    outputs: tuple[Dims | None, ...]
    linear: tuple[frozenset[int], ...] = ()
    talks: tuple[Talk, ...] = ()
    scratch: tuple[Scratch, ...] = ()
