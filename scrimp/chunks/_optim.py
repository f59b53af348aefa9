"""Optimizers as data: what to do with a gradient, by parameter name; the doing is in `_update`."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from scrimp.chunks._codec import Field, fields
from scrimp.errors import RunError

Rate = float | Callable[[int], float]
Groups = Sequence[tuple[str, Mapping[str, object]]]


class _Kept:
    """What an optimizer keeps for each parameter besides its master: so many `states`, as `state` says."""

    states: Any
    state: Any

    @property
    def fields(self) -> tuple[Field, ...]:
        return fields(self.states, self.state)

    @property
    def update_nbytes(self) -> float:
        """What an update reads and writes per parameter: gradient in, weight out, master and states in place."""
        return 2 + 2 + 2 * (4 + sum(field.dtype.itemsize / field.every for field in self.fields))


@dataclass(frozen=True, kw_only=True)
class AdamW(_Kept):
    """Decoupled weight decay, as torch.optim.AdamW. `lr` may be a function of the step, counted from 0. `groups`
    overrides fields for parameters whose name matches a glob; the first match counts.

    `state="int8"` keeps both moments in 8 bits, with a scale for every 64 of them: 8.1 bytes of model data per parameter
    in place of 14. That is other mathematics, no longer torch's AdamW: moments are rounded at random after every update
    (`_codec` says how). It holds for all parameters alike."""

    lr: Rate = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-2
    groups: Groups = ()
    state: str = "fp32"

    states = 2  # numbers kept for each parameter besides its master


@dataclass(frozen=True, kw_only=True)
class SGD(_Kept):
    """As torch.optim.SGD: weight decay is added to the gradient."""

    lr: Rate = 1e-3
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    groups: Groups = ()

    state = "fp32"

    @property
    def states(self) -> int:
        return int(any([self.momentum, *(overrides.get("momentum", 0) for _, overrides in self.groups)]))


Optimizer = AdamW | SGD


def by_parameter(optimizer: Optimizer, names: Sequence[str]) -> dict[str, Optimizer]:
    """The optimizer of each parameter, overrides applied. A glob that matches nothing is an error, as is an unknown field."""
    _check(optimizer)
    unmatched = {pattern for pattern, _ in optimizer.groups}
    known = {name for name in optimizer.__dataclass_fields__ if name not in ("groups", "state")}
    for pattern, overrides in optimizer.groups:
        unknown = {*overrides} - known
        if unknown:
            raise RunError(f"group '{pattern}' overrides {sorted(unknown)}; {type(optimizer).__name__} has {sorted(known)}")
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


def _check(optimizer: Optimizer) -> None:
    """Of the base and of every group's overrides."""
    for given in (vars(optimizer), *(overrides for _, overrides in optimizer.groups)):
        for name, value in given.items():
            if name == "betas":
                good = len(value) == 2 and all(0 <= beta < 1 for beta in value)
            elif name in ("lr", "eps", "weight_decay", "momentum"):
                good = callable(value) or value >= 0
            else:
                continue
            if not good:
                raise RunError(f"{type(optimizer).__name__}({name}={value!r}) is not possible")


def rate(optimizer: Optimizer, step: int) -> float:
    return optimizer.lr(step) if callable(optimizer.lr) else optimizer.lr
