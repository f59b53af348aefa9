"""`engine.optimizer`: an object that torch's learning-rate schedulers accept as an optimizer.

Its `param_groups` are the settings of the engine's updates, read when a step begins. It updates nothing itself: `engine.step`
does, and then calls its `step`, by which schedulers count.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch
from torch import nn

from scrimp.chunks import Optimizer, check_optimizer
from scrimp.errors import RunError

if TYPE_CHECKING:
    from scrimp.engine._training import Training

FIXED = {"nesterov", "dampening", "state"}  # memory layout and exchange depend on them
A_FUNCTION = (
    "this group's lr is a function of the step, which sets it anew in every step: give a number, AdamW(lr=3e-4), to use a "
    "scheduler or to set engine.lr"
)


class _Group(dict[str, Any]):
    """A group whose `lr` is a function rejects assignments to it."""

    fixed = False

    def __setitem__(self, key: str, value: Any) -> None:
        if self.fixed and key in ("lr", "initial_lr"):
            raise RunError(A_FUNCTION)
        super().__setitem__(key, value)

    def setdefault(self, key: str, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def update(self, *args: Any, **kwargs: Any) -> None:
        for key, value in dict(*args, **kwargs).items():
            self[key] = value


class Handle(torch.optim.Optimizer):
    """`settings` are those given to Engine. `step` and `zero_grad` belong to the engine, so calling them raises."""

    def __init__(self, settings: Optimizer, groups: Sequence[tuple[Optimizer, Sequence[nn.Parameter]]]) -> None:
        self.settings = settings
        self._first = [first for first, _ in groups]
        self._names = [f.name for f in fields(settings) if f.name not in ("groups", "state")]
        self._open, self._counting = True, False
        self.counts: Callable[[], tuple[int, int, float | None]] = lambda: (0, 0, None)  # steps, skipped, norm
        rows: list[dict[str, Any]] = []
        for first, params in groups:
            rows.append({"params": [*params], **{name: getattr(first, name) for name in self._names}})
        super().__init__(rows, {name: getattr(settings, name) for name in self._names})
        self._open = False
        self.told(0)

    @property
    def steps(self) -> int:
        """Steps since the start of training, skipped ones included; a checkpoint carries the count."""
        return self.counts()[0]

    @property
    def skipped(self) -> int:
        """Steps whose update was skipped, because a gradient was not finite."""
        return self.counts()[1]

    @property
    def norm(self) -> float | None:
        """The norm of the last global gradient, before clipping; None if nothing needed it."""
        return self.counts()[2]

    def told(self, step: int) -> None:
        """Show the current value of `lr` in groups where it is a function."""
        for group, first in zip(self.param_groups, self._first, strict=True):
            if callable(first.lr):
                dict.__setitem__(group, "lr", float(first.lr(step)))

    def now(self, step: int) -> tuple[Optimizer, ...]:
        """The checked settings of the step that begins."""
        self.told(step)
        found = []
        for number, (group, first) in enumerate(zip(self.param_groups, self._first, strict=True)):
            given = {name: _plain(group[name]) for name in self._names}
            changed = {name: value for name, value in given.items() if value != getattr(first, name)}
            if changed.keys() & FIXED:
                raise RunError(f"param_groups[{number}] has another {sorted(changed.keys() & FIXED)}; give it to Engine(...)")
            if changed.get("momentum") and not self.settings.states:
                raise RunError(
                    f"param_groups[{number}]['momentum'] is {changed['momentum']}, and Engine was given none, so there is no "
                    "place for it; give SGD(momentum=...) to Engine"
                )
            if not 0 <= given["lr"] < float("inf"):
                raise RunError(f"the learning rate of step {step} is {given['lr']!r}")
            settings = replace(first, **changed)
            try:
                check_optimizer(settings)
            except RunError as error:
                raise RunError(f"step {step}, param_groups[{number}]: {error}") from None
            found.append(settings)
        return tuple(found)

    @property
    def rates(self) -> list[float]:
        return [float(group["lr"]) for group in self.param_groups]

    def set_rates(self, values: float | Sequence[float]) -> None:
        rows = [values] * len(self.param_groups) if isinstance(values, (int, float, torch.Tensor)) else [*values]
        if len(rows) != len(self.param_groups):
            raise RunError(f"engine.lr was set to {len(rows)} values, and there are {len(self.param_groups)} groups")
        if any(group.fixed for group in self._rows):
            raise RunError(A_FUNCTION)
        for group, value in zip(self.param_groups, rows, strict=True):
            group["lr"] = float(value)

    @property
    def _rows(self) -> list[_Group]:
        return cast("list[_Group]", self.param_groups)

    def counted(self) -> None:
        """Tell schedulers, which wrap `step`, that the engine has made a step."""
        self._counting = True
        try:
            self.step()
        finally:
            self._counting = False

    # Checkpoints.

    def saved(self) -> list[dict[str, Any]]:
        """The numbers of every group, without an lr that is a function."""
        return [
            {key: value for key, value in group.items() if _is_number(value) and not (group.fixed and key == "lr")}
            for group in self._rows
        ]

    def load(self, groups: Sequence[Mapping[str, Any]]) -> bool:
        """Restore saved settings, as `load_state_dict` of torch's optimizers does. False if the groups differ in number."""
        if len(groups) != len(self.param_groups):
            return False
        for group, saved in zip(self._rows, groups, strict=True):
            for key, value in saved.items():
                known = key not in FIXED and not (group.fixed and key in ("lr", "initial_lr"))
                if known and (key in group or key not in ("betas", "momentum")):
                    group[key] = tuple(value) if isinstance(value, list) else value
        return True

    # Methods that belong to the engine.

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if not self._open:
            raise RunError("parameters cannot be added to engine.optimizer: build a new Engine with all of them")
        group = _Group(param_group)
        group.fixed = callable(group["lr"])
        self.param_groups.append(group)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if not self._counting:
            raise RunError("engine.optimizer.step(): the engine updates; call engine.step(*batch), or engine.update()")

    def zero_grad(self, set_to_none: bool = True) -> NoReturn:
        raise RunError("engine.optimizer.zero_grad(): the engine has the gradients, and clears them after each update")

    def state_dict(self) -> NoReturn:
        raise RunError("engine.optimizer.state_dict(): the engine has the states; use engine.save(folder)")

    def load_state_dict(self, state_dict: Any) -> NoReturn:
        raise RunError("engine.optimizer.load_state_dict(...): the engine has the states; use engine.load(folder)")

    def register_step_pre_hook(self, hook: Any) -> NoReturn:
        raise RunError("hooks of engine.optimizer are not called: layers are updated one by one, overlapped with the next step")

    register_step_post_hook = register_step_pre_hook


def counts_of(training: weakref.ref[Training]) -> Callable[[], tuple[int, int, float | None]]:
    """For `Handle.counts`: it keeps no engine alive."""

    def counts() -> tuple[int, int, float | None]:
        alive = training()
        return (0, 0, None) if alive is None else (alive.steps, alive.skipped, alive.norm)

    return counts


def _is_number(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(isinstance(item, (int, float)) for item in value)
    return isinstance(value, (int, float))


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return float(value)
    return tuple(value) if isinstance(value, list) else value
