"""Replaces tensors in an optimizer's parameter groups by their names in the model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from scrimp.chunks import Optimizer
from scrimp.errors import RunError


def named(optimizer: Optimizer, model: nn.Module) -> Optimizer:
    """Names in place of tensors. Call it before the model is adopted, which replaces its parameters. Frozen parameters are left
    out, as torch ignores parameters without gradient."""
    groups: Any = optimizer.groups
    if all(isinstance(chosen, str) for chosen, _ in groups):
        return optimizer
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    rows: list[Any] = []
    seen: dict[str, int] = {}
    for number, (chosen, overrides) in enumerate(groups):
        params: list[str] = []
        for param in chosen:
            if isinstance(param, torch.Tensor):
                if id(param) not in names:
                    raise RunError(
                        f"group {number} has a tensor of shape {tuple(param.shape)} that is no parameter of this model; make the "
                        "groups from the model that Engine is given, or give names"
                    )
                name = names[id(param)]
                if seen.setdefault(name, number) != number:
                    raise RunError(f"parameter {name} is in the groups {seen[name]} and {number}; give it to one")
                if param.requires_grad:
                    params.append(name)
            else:
                params.append(param)
        rows.append({"params": params, **overrides})
    return replace(optimizer, groups=rows)
