"""Checks the names given to --explain: each must be a weight, module or layer of the model."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches

from torch import nn

from scrimp.errors import ScrimpError

NEAR = 6  # how many known names an error message suggests


def check_explained(model: nn.Module, names: Sequence[str]) -> None:
    """Before the search: each must be the name of a module or a weight."""
    known = [name for name, _ in model.named_modules() if name]
    known += [name for name, _ in model.named_parameters(remove_duplicate=False)]
    for name in names:
        if name in known:
            _check_runs(model, name)
            continue
        near = dict.fromkeys([*get_close_matches(name, known, NEAR, 0.6), *(each for each in known if name and name in each)])
        words = f"did you mean {', '.join([*near][:NEAR])}?" if near else f"there are {', '.join(known[:NEAR])}, ..."
        raise ScrimpError(f"--explain {name}: the model has no weight, module or layer '{name}'; {words}")


def _check_runs(model: nn.Module, name: str) -> None:
    """A list of layers is never called itself, so the plan has no choice for it."""
    held = dict(model.named_modules()).get(name)
    inside = any(part.isdigit() for part in name.split("."))
    if held is None or inside or type(held).forward is not nn.Module.forward:
        return
    members = [f"{name}.{each}" for each, _ in held.named_children()]
    if len(members) > 1:
        raise ScrimpError(f"--explain {name}: it is a list of {len(members)} modules; name one, {members[0]} to {members[-1]}")
