"""torch's optimizers as scrimp's: groups, settings, and learning rates that a scheduler moves.

A door keeps the torch optimizer of a script as a shell: schedulers and checkpoints of its library read and write its groups, and
it never gets a gradient. `optimizer_of` makes the engine's optimizer from it, and `copy_settings` gives the engine its current
settings before an update.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from scrimp._warnings import warn
from scrimp.chunks import SGD, AdamW, Optimizer
from scrimp.engine import Engine
from scrimp.errors import RunError

KINDS: dict[type[torch.optim.Optimizer], type[Optimizer]] = {torch.optim.AdamW: AdamW, torch.optim.SGD: SGD}
SETTINGS: dict[type[Optimizer], tuple[str, ...]] = {
    AdamW: ("lr", "betas", "eps", "weight_decay"),
    SGD: ("lr", "momentum", "dampening", "weight_decay", "nesterov"),
}
NOT_DONE = ("amsgrad", "maximize", "differentiable")  # settings of torch that scrimp's updates lack
KNOWN = "torch.optim.AdamW (in TrainingArguments: optim='adamw_torch_fused') and torch.optim.SGD (optim='sgd')"


def optimizer_of(
    optimizer: torch.optim.Optimizer,
    names: Iterable[tuple[str, torch.Tensor]],
    rates: Sequence[float] | None = None,
) -> Optimizer:
    """The same optimizer as an argument for Engine, with the same groups in the same order.

    `names`: the model's parameters with their names, as `model.named_parameters()` gives them. `rates`: learning rates of the
    groups; those of the optimizer if left out. Frozen parameters are left out, as torch ignores parameters without gradients.
    """
    kind = _kind(optimizer)
    groups = optimizer.param_groups
    if rates is not None and len(rates) != len(groups):
        raise RunError(f"{len(rates)} learning rates were given for the {len(groups)} groups of {type(optimizer).__name__}")
    of = {id(parameter): name for name, parameter in names}
    rows: list[Mapping[str, Any]] = []
    for number, group in enumerate(groups):
        wrong = [name for name in NOT_DONE if group.get(name)]
        if wrong:
            raise RunError(
                f"group {number} of {type(optimizer).__name__} has {wrong[0]}=True, which scrimp.{kind.__name__} does not do"
            )
        settings = _settings(kind, group)
        if rates is not None:
            settings["lr"] = float(rates[number])
        rows.append({"params": _names(group["params"], of, number), **settings})
    if not all(group.get("fused") for group in groups):
        warn(
            f"torch.optim.{kind.__name__} without fused=True rounds in other places than the engine, so the last bits of weights "
            "differ; with fused=True (in TrainingArguments: optim='adamw_torch_fused') they are equal"
        )
    return kind(rows, **{key: value for key, value in rows[0].items() if key != "params"})


def copy_settings(optimizer: torch.optim.Optimizer, engine: Engine) -> None:
    """Give the engine the current settings of each group, for its next step or `update`."""
    kind = _kind(optimizer)
    for group, mine in zip(optimizer.param_groups, engine.optimizer.param_groups, strict=True):
        mine.update(_settings(kind, group))


def _kind(optimizer: torch.optim.Optimizer) -> type[Optimizer]:
    """The class that makes the same updates. A subclass counts if it has torch's own step."""
    for theirs, mine in KINDS.items():
        if isinstance(optimizer, theirs) and type(optimizer).step is theirs.step:
            return mine
    raise RunError(
        f"{type(optimizer).__module__}.{type(optimizer).__qualname__} is an optimizer that scrimp does not have; it has {KNOWN}"
    )


def _settings(kind: type[Optimizer], group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _plain(group[key]) for key in SETTINGS[kind]}


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return float(value)
    return tuple(map(_plain, value)) if isinstance(value, (tuple, list)) else value


def _names(params: Iterable[torch.Tensor], of: Mapping[int, str], number: int) -> list[str]:
    found = []
    for param in params:
        if id(param) not in of:
            raise RunError(
                f"group {number} of the optimizer has a tensor of shape {tuple(param.shape)} that is no parameter of the model; "
                "make the optimizer from this model's parameters"
            )
        if param.requires_grad:
            found.append(of[id(param)])
    return found
