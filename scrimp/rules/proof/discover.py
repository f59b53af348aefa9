"""Discovers a sharding rule by trial: equates dims of one size as one factor, splits them, runs the operator unchanged on each
shard, and tests whether the concatenated or summed results equal the unsharded one. Correct factors are written as the text that
`core/text.py` reads. Literal arguments are not changed: a rule that depends on one is not found."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import product
from math import prod

from scrimp.capture import Op, Value
from scrimp.layout import Mesh
from scrimp.rules.core.call import At, bind
from scrimp.rules.core.layouts import may_split
from scrimp.rules.core.rule import FREE, SUM, WHOLE, Dims, Factor, Rule
from scrimp.rules.core.text import literal
from scrimp.rules.proof.check import check

_MOST_TRIES = 4096  # per size of a dim

Tie = tuple[int | None, ...]  # for each tensor, inputs first, the dim that has the factor
Tell = Callable[[Tie, str | None], None]


def discover(op: Op, values: Mapping[str, Value], tell: Tell | None = None) -> str | None:
    """The text of the widest rule that passes the check, as a line of `DISCOVERED`; None if no dim may be split. Shapes with
    distinct sizes make it fast and unambiguous. `tell` is called for every factor tried: its dim by tensor, and its kind, "free"
    or "sum", if it is one."""
    shapes = [values[name].shape for name in op.inputs]
    made = [values[name].shape for name in op.outputs if name is not None]
    if len(made) != len(op.outputs):
        return None
    found: list[tuple[Tie, str]] = []
    for tie in _ties(shapes + made):
        taken = any(a is not None and a == b for other, _ in found for a, b in zip(tie, other, strict=True))
        kind = None if taken else _proven(op, values, tie, shapes, made)
        if kind is not None and not _go_together(op, values, [*found, (tie, kind)], shapes, made):
            kind = None
        if kind is not None:
            found.append((tie, kind))
        if tell is not None and not taken:
            tell(tie, kind)
    if not found:
        return None
    rule = _rule(found, shapes, made)
    linear = [index for index in range(len(shapes)) if _passes_sums(op, values, rule, index)]
    return f'"{op.target}": "{"; ".join([_text(found, shapes, made, linear), *_given(op)])}",'


def _given(op: Op) -> list[str]:
    """The literals of the call: the rule holds for these alone."""
    call = bind(op)
    assert call is not None
    literals = {name: each for name, each in call.arguments.items() if not _tensors(each)}
    return [f"given {name}={literal(each)}" for name, each in literals.items() if each is not None]


def _tensors(argument: object) -> bool:
    return isinstance(argument, At) or (isinstance(argument, tuple) and any(map(_tensors, argument)))


def _ties(shapes: list[tuple[int, ...]]) -> Iterator[Tie]:
    """For each size, each way to choose a dim of it, or none, of every tensor; those with most dims first. At least one input."""
    for size in dict.fromkeys(size for shape in shapes for size in shape if size > 1):
        ways = [[*(at for at, each in enumerate(shape) if each == size), None] for shape in shapes]
        if prod(map(len, ways)) <= _MOST_TRIES:
            yield from sorted(product(*ways), key=lambda tie: sum(at is None for at in tie))


def _proven(
    op: Op, values: Mapping[str, Value], tie: Tie, shapes: list[tuple[int, ...]], made: list[tuple[int, ...]]
) -> str | None:
    """The kind of the factor, if the check passes."""
    if all(at is None for at in tie[: len(shapes)]):
        return None
    for kind in (FREE, SUM) if None in tie[len(shapes) :] else (FREE,):
        rule = _rule([(tie, kind)], shapes, made)
        members = _parts(rule.factors[0].size)
        if members is None:
            return None
        if not any(check(op, values, {0: ("x",)}, Mesh({"x": members}), rule=rule, seed=seed) for seed in (0, 1)):
            return kind
    return None


def _go_together(
    op: Op, values: Mapping[str, Value], found: list[tuple[Tie, str]], shapes: list[tuple[int, ...]], made: list[tuple[int, ...]]
) -> bool:
    """Whether factors that are right alone are so in pairs."""
    rule, last = _rule(found, shapes, made), len(found) - 1
    for first in range(last):
        sizes = [_parts(rule.factors[index].size) or 1 for index in (first, last)]
        mesh = Mesh({"x": sizes[0], "y": sizes[1]})
        if check(op, values, {first: ("x",), last: ("y",)}, mesh, rule=rule):
            return False
    return True


def _passes_sums(op: Op, values: Mapping[str, Value], rule: Rule, index: int) -> bool:
    if not values[op.inputs[index]].dtype.startswith(("float", "bfloat")) or op.inputs.count(op.inputs[index]) > 1:
        return False
    loose = Rule(factors=rule.factors, inputs=rule.inputs, outputs=rule.outputs, linear=(frozenset({index}),))
    return not check(op, values, {}, Mesh({"x": 2}), rule=loose, sums={"x": 0})


def _parts(size: int) -> int | None:
    """The smallest number of members that a dim may be split over."""
    return next((count for count in (2, 3, 5, 7) if may_split(Factor(size=size), count)), None)


def _rule(found: list[tuple[Tie, str]], shapes: list[tuple[int, ...]], made: list[tuple[int, ...]]) -> Rule:
    """The rule of the factors found; all other dims are unsplit."""
    every = shapes + made
    factors = [
        Factor(size=next(every[tensor][at] for tensor, at in enumerate(tie) if at is not None), kind=kind) for tie, kind in found
    ]

    def dims(tensor: int) -> Dims:
        out: list[tuple[int, ...]] = []
        for at, size in enumerate(every[tensor]):
            known = next((index for index, (tie, _) in enumerate(found) if tie[tensor] == at), None)
            if known is None:
                factors.append(Factor(size=size, kind=WHOLE))
            out.append((len(factors) - 1 if known is None else known,))
        return tuple(out)

    placed = [dims(tensor) for tensor in range(len(every))]
    return Rule(factors=tuple(factors), inputs=tuple(placed[: len(shapes)]), outputs=tuple(placed[len(shapes) :]))


def _text(found: list[tuple[Tie, str]], shapes: list[tuple[int, ...]], made: list[tuple[int, ...]], linear: list[int]) -> str:
    letters, whole = "abcdefghijklmnopqrstuvwxyz", list[str]()

    def names(tensor: int, shape: tuple[int, ...]) -> str:
        out = []
        for at in range(len(shape)):
            known = next((index for index, (tie, _) in enumerate(found) if tie[tensor] == at), None)
            if known is None:
                whole.append(f"w{len(whole)}")
            out.append(whole[-1] if known is None else letters[known])
        return " ".join(out)

    sides = [names(tensor, shape) for tensor, shape in enumerate(shapes + made)]
    text = f"{', '.join(sides[: len(shapes)])} -> {', '.join(sides[len(shapes) :])}"
    summed = [letters[index] for index, (_, kind) in enumerate(found) if kind == SUM]
    notes = [f"sum {' '.join(summed)}"] if summed else []
    notes += [f"whole {' '.join(whole)}"] if whole else []
    return "; ".join([text, *notes, *(f"linear {index}" for index in linear)])
