"""Rules as text, for operators whose dims are the factors themselves.

    "i k, k j -> i j; sum k; linear 0; linear 1"

One name for each dim of each tensor; `sum` and `whole` name factors, each `linear` the inputs of one set. `given dim=1` restricts
the rule to calls with that argument.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from scrimp.rules.core.builder import Draft
from scrimp.rules.core.call import Call
from scrimp.rules.core.rule import FREE, SUM, WHOLE, Dims, Rule


def written(text: str) -> Callable[[Call], Rule | None]:
    """Parses a rule, for every call whose tensors have such dims; it returns None for others."""
    tensors, *notes = (part.strip() for part in text.split(";"))
    before, after = (tuple(tuple(part.split()) for part in side.split(",")) for side in tensors.split("->"))
    kinds, linear, given = dict[str, str](), list[frozenset[int]](), dict[str, str]()
    for note in notes:
        what, *names = note.split()
        if what == "given":
            given.update((each.partition("=")[0], each.partition("=")[2]) for each in names)
        elif what == "linear":
            linear.append(frozenset(map(int, names)))
        else:
            kinds.update(dict.fromkeys(names, {"sum": SUM, "whole": WHOLE}[what]))

    def rule(call: Call) -> Rule | None:
        shapes = (*call.shapes, *call.made)
        if any(literal(call.arguments[name]) != wanted for name, wanted in given.items()):
            return None
        if [len(shape) if shape is not None else None for shape in call.shapes] != [len(names) for names in before]:
            return None
        draft, factors, sizes = Draft(call), dict[str, tuple[int, ...]](), dict[str, int]()
        for names, shape in zip((*before, *after), shapes, strict=False):
            for name, size in zip(names, shape or (), strict=False):
                if sizes.setdefault(name, size) != size:
                    return None
        for name, size in sizes.items():
            factors[name] = draft.dim(size, kinds.get(name, FREE))

        def placed(names: tuple[str, ...]) -> Dims:
            return tuple(factors[name] for name in names)

        draft.inputs = {index: placed(names) for index, names in enumerate(before)}
        return draft.made([placed(names) if set(names) <= set(factors) else None for names in after], linear=linear)

    return rule


def literal(argument: Any) -> str:
    """An argument as text."""
    return repr(argument).replace(" ", "")
