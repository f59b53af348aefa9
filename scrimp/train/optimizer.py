"""The engine's optimizer and exchange of a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from scrimp.chunks import SGD, AdamW, Optimizer
from scrimp.exchange import Dense, Sparse
from scrimp.train.config.sections import ExchangeSection, OptimizerSection
from scrimp.train.schedule import Factor, Rate


def optimizer_of(section: OptimizerSection, factor: Factor) -> Optimizer:
    """Every group's rate follows the same schedule."""
    names = ("weight_decay", "betas", "eps", "state") if section.name == "adamw" else ("weight_decay", "momentum", "dampening")
    given: dict[str, Any] = {name: getattr(section, name) for name in names if getattr(section, name) is not None}
    if section.name == "sgd" and section.nesterov:
        given["nesterov"] = True
    groups = [(str(group["params"]), _overrides(group, factor)) for group in section.groups]
    kind: Any = AdamW if section.name == "adamw" else SGD
    made: Optimizer = kind(groups, lr=Rate(lr=float(section.lr), factor=factor), **given)
    return made


def _overrides(group: Mapping[str, Any], factor: Factor) -> dict[str, Any]:
    given = {key: value for key, value in group.items() if key != "params"}
    found: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in given.items()}
    if isinstance(found.get("lr"), (int, float)):
        found["lr"] = Rate(lr=float(found["lr"]), factor=factor)
    return found


def exchange_of(section: ExchangeSection) -> Dense | Sparse:
    if section.kind == "dense":
        return Dense()
    return Sparse(
        density=section.density, warm_up=section.warm_up, values=section.values, residual=section.residual, axis=section.axis
    )
