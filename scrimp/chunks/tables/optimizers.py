"""Optimizers as data: the settings of an update, by parameter name. `update/update.py` runs the update."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from scrimp.chunks.tables.state_codec import Field, state_fields
from scrimp.errors import RunError

Rate = float | Callable[[int], float]
# Accepted forms: (glob, overrides) pairs; torch's dicts with "params"; or tensors, with or without names. They are stored as
# pairs of what is selected (a glob, or a tuple of tensors and globs) and overrides.
Groups = Iterable[tuple[str, Mapping[str, object]] | Mapping[str, Any] | torch.Tensor | tuple[str, torch.Tensor]]
Chosen = str | tuple[str | torch.Tensor, ...]


class _Kept:
    """Memory per parameter besides its master: `states` tensors, in the format `state`."""

    states: Any
    state: Any
    groups: Any

    def __post_init__(self) -> None:
        object.__setattr__(self, "groups", _normal(self.groups))

    @property
    def fields(self) -> tuple[Field, ...]:
        return state_fields(self.states, self.state)

    @property
    def update_nbytes(self) -> float:
        """Bytes that an update reads and writes per parameter: gradient in, weight out, master and states in place."""
        return 2 + 2 + 2 * (4 + sum(field.dtype.itemsize / field.every for field in self.fields))


@dataclass(frozen=True, kw_only=True)
class AdamW(_Kept):
    """AdamW with decoupled weight decay, as torch.optim.AdamW. `lr` may be a function of the step, counted from 0. `groups` gives
    some parameters other settings. In torch's form, also as the first argument: dicts with parameters or their names under
    "params"; together they must contain all trained parameters. Or pairs (glob, settings): the first glob that matches a
    parameter's name counts, and parameters that match none have the settings given here.

    `state="int8"` stores both moments in 8 bits, with a scale for every 64 of them: 8.1 bytes of model data per parameter
    instead of 14. This changes numerical results, so it is opt-in: moments are rounded stochastically after every update
    (see `tables/state_codec.py`). It applies to all parameters.

    >>> import scrimp
    >>> optimizer = scrimp.AdamW([("*.bias", {"weight_decay": 0.0})], lr=3e-4)
    >>> optimizer.lr, optimizer.weight_decay
    (0.0003, 0.01)
    """

    groups: Groups = field(default=(), kw_only=False)
    lr: Rate = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-2
    state: str = "fp32"

    states = 2  # tensors per parameter besides its master


@dataclass(frozen=True, kw_only=True)
class SGD(_Kept):
    """SGD as torch.optim.SGD: weight decay is added to the gradient.

    >>> import scrimp
    >>> scrimp.SGD(lr=0.1, momentum=0.9).momentum
    0.9
    """

    groups: Groups = field(default=(), kw_only=False)
    lr: Rate = 1e-3
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False

    state = "fp32"

    @property
    def states(self) -> int:
        groups: Any = self.groups
        return int(any([self.momentum, *(overrides.get("momentum", 0) for _, overrides in groups)]))


Optimizer = AdamW | SGD


def _normal(groups: Any) -> tuple[tuple[Chosen, Mapping[str, object]], ...]:
    """Converts every form to pairs; consumes iterators such as model.parameters() once."""
    if isinstance(groups, (str, torch.Tensor)) or not isinstance(groups, Iterable):
        raise RunError(f"the optimizer's first argument is {groups!r}: give parameters or groups, as torch has it, or lr=...")
    rows = [groups] if isinstance(groups, Mapping) else list(groups)
    if rows and all(isinstance(_tensor(row), torch.Tensor) for row in rows):
        rows = [{"params": rows}]
    found: list[tuple[Chosen, Mapping[str, object]]] = []
    for row in rows:
        if isinstance(row, Mapping):
            if "params" not in row:
                raise RunError(f'a group of parameters has no "params", only {sorted(row)}')
            given = row["params"]
            params = [given] if isinstance(given, (str, torch.Tensor)) else list(given)
            overrides = {key: value for key, value in row.items() if key != "params"}
            found.append((tuple(_tensor(param) for param in params), overrides))
        elif isinstance(row, tuple) and len(row) == 2 and isinstance(row[1], Mapping):
            found.append((row[0], row[1]))
        else:
            raise RunError(
                f"a group of parameters is a {type(row).__name__}; give dicts with 'params', as torch has them, or pairs "
                "(glob, settings)"
            )
    if len({isinstance(chosen, str) for chosen, _ in found}) > 1:
        raise RunError('groups are either dicts with "params" or pairs (glob, settings), not both')
    return tuple(found)


def _tensor(row: Any) -> Any:
    """The tensor without the name that torch allows with it."""
    return row[1] if isinstance(row, tuple) and len(row) == 2 and isinstance(row[1], torch.Tensor) else row


def settings_by_group(optimizer: Optimizer, names: Sequence[str]) -> list[tuple[Optimizer, list[str]]]:
    """The settings of every group with the names of its parameters; parameters that match no glob come first. An error if a glob
    matches nothing, if a field is unknown, and in torch's form if a parameter is in no group or in two. Tensors must have been
    replaced by names before."""
    check_optimizer(optimizer)
    groups: tuple[tuple[Chosen, Mapping[str, Any]], ...] = optimizer.groups  # type: ignore[assignment]
    known = {name for name in optimizer.__dataclass_fields__ if name not in ("groups", "state")}
    by_glob = all(isinstance(chosen, str) for chosen, _ in groups)
    settings = [replace(optimizer, groups=())]
    patterns: list[tuple[Any, ...]] = [()]
    for number, (chosen, overrides) in enumerate(groups):
        label = f"'{chosen}'" if isinstance(chosen, str) else str(number)
        unknown = {*overrides} - known
        if unknown:
            raise RunError(f"group {label} overrides {sorted(unknown)}; {type(optimizer).__name__} has {sorted(known)}")
        settings.append(replace(optimizer, groups=(), **overrides))
        patterns.append((chosen,) if isinstance(chosen, str) else chosen)
    unmatched = {pattern for row in patterns for pattern in row}
    found: list[list[str]] = [[] for _ in settings]
    rows = [Patterns(row) for row in patterns]
    for name in names:
        matches = [row.matching(name) for row in rows]
        exact = [k for k, matched in enumerate(matches) if name in matched]
        at = [k for k, matched in enumerate(matches) if matched] if by_glob or not exact else exact
        for k in at[:1] if by_glob else at:
            unmatched -= matches[k]
        if len(at) > 1 and not by_glob:
            raise RunError(f"parameter {name} is in the groups {[k - 1 for k in at]}; give it to one")
        found[at[0] if at else 0].append(name)
    if unmatched:
        some = ", ".join(list(names)[:5])
        raise RunError(f"no parameter matches the group globs {sorted(unmatched)}; there are {len(names)}, such as {some}")
    if found[0] and not by_glob:
        raise RunError(
            f"{len(found[0])} trained parameters are in no group, such as {', '.join(found[0][:5])}; give them one, or "
            "requires_grad_(False) before Engine(...)"
        )
    if not found[0] and groups:
        settings, found = settings[1:], found[1:]
    return list(zip(settings, found, strict=True))


class Patterns:
    """Globs and exact names. A name that is equal to a pattern matches it, whatever characters it has; only patterns with
    wildcards are compared one by one."""

    def __init__(self, patterns: Iterable[str]) -> None:
        self._names = {*patterns}
        self._globs = sorted(pattern for pattern in self._names if any(sign in pattern for sign in "*?["))

    def matching(self, name: str) -> set[str]:
        """The patterns that a name matches."""
        return {pattern for pattern in self._globs if fnmatch.fnmatchcase(name, pattern)} | ({name} & self._names)


def by_parameter(optimizer: Optimizer, names: Sequence[str]) -> dict[str, Optimizer]:
    """The optimizer settings of each parameter, with overrides."""
    return {name: settings for settings, members in settings_by_group(optimizer, names) for name in members}


def check_optimizer(optimizer: Optimizer) -> None:
    """Checks the values of the base settings and of every group's overrides."""
    groups: tuple[tuple[Chosen, Mapping[str, Any]], ...] = optimizer.groups  # type: ignore[assignment]
    for given in (vars(optimizer), *(overrides for _, overrides in groups)):
        for name, value in given.items():
            if name not in ("betas", "lr", "eps", "weight_decay", "momentum"):
                continue
            wanted = "two numbers from 0 to below 1" if name == "betas" else "a number of 0 or more"
            try:
                if name == "betas":
                    good = len(value) == 2 and all(0 <= beta < 1 for beta in value)
                else:
                    good = (callable(value) and name == "lr") or 0 <= value < float("inf")
            except TypeError:  # no number
                good = False
            if not good:
                raise RunError(f"{type(optimizer).__name__}({name}={value!r}) is not possible: give {wanted}")


def rate(optimizer: Optimizer, step: int) -> float:
    return optimizer.lr(step) if callable(optimizer.lr) else optimizer.lr
