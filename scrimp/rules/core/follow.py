"""Finds the choice that gives one operand a layout, so that an operator can follow the one before it without resharding.

Dims of operand and layout are both products, cut at different places: 32 rows over x meet (batch 4) (sequence 8). Factors of the
rule are refined (`refine`) where the layout needs it; a factor that must be a range or unsplit may prevent that.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from scrimp.layout import Layout, Mesh
from scrimp.rules.core.layouts import Split, Sums, refine, simplest
from scrimp.rules.core.rule import WHOLE, Dims, Rule

Piece = tuple[int, str | None]  # a size, and the axis that splits all of it


def follow(
    rule: Rule, operand: Dims, layout: Layout, sizes: Sequence[int], mesh: Mesh, *, index: int | None = None
) -> tuple[Rule, Split, Sums] | None:
    """The rule, refined as needed, and the choice for which `operand` (one of the rule's inputs or outputs) has this layout,
    whose factors have these sizes. `index`: which input it is; without it partial sums cannot be followed. None if there is no
    such choice."""
    layout, sizes = simplest(layout, sizes, mesh)
    sums: dict[str, int] = {}
    for axis in layout.partial:
        sets = [at for at, members in enumerate(rule.linear) if index in members]
        if not sets:
            return None
        sums[axis] = min(sets, key=lambda at: len(rule.linear[at]))
    cut: dict[int, list[Piece]] = {}
    left = list(zip(layout.dims, sizes, strict=True))
    for dim, count in zip(operand, layout.factors or (1,) * len(layout.dims), strict=True):
        wanted = [piece for axes, size in (left.pop(0) for _ in range(count)) for piece in _pieces(axes, size, mesh)]
        aligned = _aligned([(factor, rule.factors[factor].size) for factor in dim], wanted)
        if aligned is None or any(cut.get(factor, pieces) != pieces for factor, pieces in aligned.items()):
            return None
        cut.update(aligned)
    split: dict[int, tuple[str, ...]] = {}
    for factor, pieces in cut.items():
        groups = _groups(pieces)
        if not any(axes for _, axes in groups):
            continue
        if rule.factors[factor].kind == WHOLE:
            return None
        places, finer = [factor, *range(len(rule.factors), len(rule.factors) + len(groups) - 1)], rule
        if len(groups) > 1:
            refined = refine(rule, factor, [size for size, _ in groups])
            if refined is None:
                return None
            finer = refined
        rule = finer
        split.update({place: axes for place, (_, axes) in zip(places, groups, strict=True) if axes})
    return rule, split, sums


def _pieces(axes: Sequence[str], size: int, mesh: Mesh) -> list[Piece]:
    """A factor over axes as one factor per axis, and the local rest."""
    over = [(mesh.axis_size(axis), axis) for axis in axes]
    rest = size // prod(count for count, _ in over)
    return [*over, (rest, None)] if rest > 1 else [*over]


def _aligned(factors: Sequence[tuple[int, int]], wanted: Sequence[Piece]) -> dict[int, list[Piece]] | None:
    """The pieces of each factor of a dim, major first; factors without pieces stay as they are."""
    cut: dict[int, list[Piece]] = {factor: [] for factor, _ in factors}
    left, pieces = [list(each) for each in factors], list(wanted)
    while any(axis is not None for _, axis in pieces):
        if not left:
            return None
        (factor, size), (count, axis) = left[0], pieces[0]
        taken = count if size % count == 0 else size if axis is None and count % size == 0 else None
        if taken is None:
            return None
        cut[factor].append((taken, axis))
        left[0][1] //= taken
        pieces[0] = (count // taken, axis)
        left, pieces = (left[1:] if left[0][1] == 1 else left), (pieces[1:] if pieces[0][0] == 1 else pieces)
    for factor, size in left:
        cut[factor] += [(size, None)] if size > 1 else []
    return cut


def _groups(pieces: Sequence[Piece]) -> list[tuple[int, tuple[str, ...]]]:
    """Merges pieces into few factors: the axes that split one, then its local part."""
    starts = [at for at, (_, axis) in enumerate(pieces) if at == 0 or (axis is not None and pieces[at - 1][1] is None)]
    runs = [pieces[start:stop] for start, stop in zip(starts, [*starts[1:], len(pieces)], strict=True)]
    return [(prod(size for size, _ in run), tuple(axis for _, axis in run if axis is not None)) for run in runs]
