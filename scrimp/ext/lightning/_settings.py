"""What the Trainer and the optimizer say, as settings of the engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from scrimp.errors import RunError

# Trainer(precision=...): the engine's. The engine keeps fp32 master weights, and computes with weights of this precision.
PRECISIONS = {"32-true": "fp32", "bf16-mixed": "bf16", "bf16-true": "bf16", "16-mixed": "fp16"}
FOLLOWED = "precision='32-true', 'bf16-mixed', 'bf16-true' or '16-mixed' (fp16 with a scaled loss)"


@dataclass(frozen=True, kw_only=True)
class Fit:
    """What an engine is built with for `trainer.fit`, and must stay as it is."""

    micro_batches: int
    clip_norm: float | None


def precision_of(plugin: Any, chosen: str | None) -> str:
    """`plugin`: Lightning's precision plugin, made from the Trainer's flag. `chosen`: that of `Budget`, which comes first."""
    given = str(plugin.precision)
    kind = type(plugin).__name__
    usual = kind in ("Precision", "MixedPrecision", "HalfPrecision", "BudgetPrecision")
    if not usual or given not in PRECISIONS:
        what = f"Trainer(precision={given!r})" if usual or kind == "DoublePrecision" else f"the plugin {kind}"
        raise RunError(f"{what} is not possible with Budget, whose engine computes in fp32, bf16 or fp16: give {FOLLOWED}")
    if chosen is None:
        return PRECISIONS[given]
    if chosen not in PRECISIONS.values():
        raise RunError(f"Budget(precision={chosen!r}): there are 'fp32', 'bf16' and 'fp16'; or use Trainer(precision=...)")
    if given != "32-true" and PRECISIONS[given] != chosen:  # 32-true is also what a Trainer says that nobody told anything
        raise RunError(f"Trainer(precision={given!r}) and Budget(precision={chosen!r}) differ; give one of them")
    return chosen


def fit_of(trainer: Any) -> Fit:
    return Fit(micro_batches=trainer.accumulate_grad_batches, clip_norm=clip_of(trainer))


def clip_of(trainer: Any) -> float | None:
    value = trainer.gradient_clip_val
    if value is None or value <= 0:
        return None
    algorithm = trainer.gradient_clip_algorithm
    if algorithm is not None and str(getattr(algorithm, "value", algorithm)) != "norm":
        raise RunError(
            f"Trainer(gradient_clip_algorithm={str(getattr(algorithm, 'value', algorithm))!r}) is not possible with Budget: the "
            "engine clips by the norm of all gradients; give gradient_clip_algorithm='norm'"
        )
    return float(value)


def saved_groups(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The settings of each group, among them those that a scheduler put there, such as `initial_lr`."""
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def load_groups(optimizer: torch.optim.Optimizer, groups: list[Mapping[str, Any]]) -> None:
    if len(groups) != len(optimizer.param_groups):
        raise RunError(f"the checkpoint has {len(groups)} groups of parameters, the optimizer has {len(optimizer.param_groups)}")
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        group.update(saved)
