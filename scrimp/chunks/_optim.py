"""Optimizers as data: what to do with a gradient, by parameter name; the doing is in `_update`."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from scrimp.errors import RunError

Rate = float | Callable[[int], float]
Groups = Sequence[tuple[str, Mapping[str, object]]]


@dataclass(frozen=True, kw_only=True)
class AdamW:
    """Decoupled weight decay, as torch.optim.AdamW. `lr` may be a function of the step, counted from 0. `groups`
    overrides fields for parameters whose name matches a glob; the first match counts."""

    lr: Rate = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-2
    groups: Groups = ()

    states = 2  # fp32 numbers kept for each parameter besides its master


@dataclass(frozen=True, kw_only=True)
class SGD:
    """As torch.optim.SGD: weight decay is added to the gradient."""

    lr: Rate = 1e-3
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    groups: Groups = ()

    @property
    def states(self) -> int:
        return 1 if self.momentum else 0


Optimizer = AdamW | SGD


def by_parameter(optimizer: Optimizer, names: Sequence[str]) -> dict[str, Optimizer]:
    """The optimizer of each parameter, overrides applied. A glob that matches nothing is an error, as is an unknown field."""
    unmatched = {pattern for pattern, _ in optimizer.groups}
    fields = {name for name in optimizer.__dataclass_fields__ if name != "groups"}
    for pattern, overrides in optimizer.groups:
        unknown = {*overrides} - fields
        if unknown:
            raise RunError(f"group '{pattern}' overrides {sorted(unknown)}; {type(optimizer).__name__} has {sorted(fields)}")
    chosen: dict[str, Optimizer] = {}
    for name in names:
        chosen[name] = replace(optimizer, groups=())
        for pattern, overrides in optimizer.groups:
            if fnmatch.fnmatchcase(name, pattern):
                unmatched.discard(pattern)
                chosen[name] = replace(optimizer, groups=(), **overrides)  # type: ignore[arg-type]
                break
    if unmatched:
        some = ", ".join(list(names)[:5])
        raise RunError(f"no parameter matches the group globs {sorted(unmatched)}; there are {len(names)}, such as {some}")
    return chosen


def rate(optimizer: Optimizer, step: int) -> float:
    return optimizer.lr(step) if callable(optimizer.lr) else optimizer.lr
