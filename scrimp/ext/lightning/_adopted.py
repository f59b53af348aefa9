"""An engine with the LightningModule that it has adopted: that of an earlier run, or a new one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from scrimp.chunks import Optimizer
from scrimp.engine import Engine
from scrimp.errors import RunError
from scrimp.exchange import Sparse
from scrimp.ext.lightning._repeats import Counted
from scrimp.ext.lightning._settings import Fit
from scrimp.ext.lightning._step import Method

KEY = "_scrimp_adopted"  # the module's own attribute, so that engine and module are freed together


@dataclass
class Adopted:
    """`budget`: the settings that it was built with. `fit`: None if it cannot train."""

    engine: Engine
    method: Method
    counted: Counted
    budget: dict[str, Any]
    fit: Fit | None


def adopted(
    module: Any,
    settings: Mapping[str, Any],
    fit: Fit | None,
    *,
    device: torch.device,
    weights: Any,
    optimizer: Optimizer | None,
) -> Adopted:
    """`settings`: those of `Budget`. `fit`: None if the run does not train."""
    budget = {**settings, "device": device}
    own: dict[str, Any] = module.__dict__
    if KEY not in own:
        own[KEY] = _adopt(module, budget, fit, weights, optimizer)
    found: Adopted = own[KEY]
    _check_same(found, budget, fit)
    return found


def _adopt(module: Any, budget: dict[str, Any], fit: Fit | None, weights: Any, optimizer: Optimizer | None) -> Adopted:
    more: dict[str, Any] = {}
    if fit is None:  # no masters, no states
        for parameter in module.parameters():
            parameter.requires_grad_(False)
    else:
        if isinstance(budget["exchange"], Sparse) and fit.micro_batches > 1:
            raise RunError(
                f"Trainer(accumulate_grad_batches={fit.micro_batches}) with Sparse is not possible: a rank selects what it sends "
                "in the backward of the last micro-batch; use accumulate_grad_batches=1 and a larger batch"
            )
        more = {"micro_batches": fit.micro_batches, "clip_norm": fit.clip_norm}
    method = Method(module)
    try:
        engine = Engine(module, optimizer=optimizer, weights=weights, **more, **budget)
    except BaseException:
        method.remove()
        raise
    return Adopted(engine=engine, method=method, counted=Counted(module), budget=budget, fit=fit)


def _check_same(found: Adopted, budget: dict[str, Any], fit: Fit | None) -> None:
    other = [name for name in budget if budget[name] != found.budget[name]]
    if other:
        raise RunError(
            f"the weights of this LightningModule live in the engine of an earlier run, with {other[0]}="
            f"{found.budget[other[0]]!r}, and this Budget has {budget[other[0]]!r}: use the same Budget, or a new module and a "
            "checkpoint"
        )
    if fit is None or found.fit == fit:
        return
    if found.fit is None:
        raise RunError(
            "this LightningModule was adopted by trainer.validate, test or predict, without optimizer states: for trainer.fit "
            "make a new module. To validate before training use Trainer(num_sanity_val_steps=-1)"
        )
    raise RunError(f"the engine of this LightningModule was built for {found.fit}, and this Trainer has {fit}; use a new module")
