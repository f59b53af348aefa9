"""Batch norm on one of several members that share the batch: sums per channel are all-reduced, the rest is local. First the mean,
then the squared deviations from it, because a difference of two large sums would lose digits."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import torch

from scrimp.rules.core.local_context import Here, Runs


def _spread(here: Here) -> list[int]:
    return [factor for index, dim in enumerate(here.of("input")) if index != 1 for factor in dim]


def _high(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _wide(tensor: torch.Tensor) -> torch.dtype:
    return _high(tensor.new_empty(0)).dtype


def _forward(here: Here, given: dict[str, Any]) -> tuple[Any, ...]:
    spread = _spread(here)
    training = given.get("training", not here.call.op.target.endswith("no_training.default"))
    if not training or here.count(spread) == 1:
        return here.call.run(given)
    x, over, shape = given["input"], _over(given["input"]), _per_channel(given["input"])
    count = prod(here.rule.factors[factor].size for factor in spread)
    mean = here.reduce(x.sum(over, dtype=_wide(x)), "sum", spread) / count
    off = x - mean.view(shape)
    variance = here.reduce((off * off).sum(over), "sum", spread) / count
    inverse = (variance + given["eps"]).rsqrt()
    out = off.mul_(inverse.view(shape))
    if given["weight"] is not None:
        out.mul_(given["weight"].view(shape))
    if given["bias"] is not None:
        out.add_(given["bias"].view(shape))
    kept = _kept(given)
    made = (out.to(given["input"].dtype), mean.to(kept), inverse.to(kept))
    if "functional" not in here.call.op.target:
        return made
    momentum, unbiased = given["momentum"], variance * (count / (count - 1))
    running = ((given["running_mean"], mean), (given["running_var"], unbiased))
    return *made, *((old * (1 - momentum) + new * momentum).to(old.dtype) for old, new in running)


def _backward(here: Here, given: dict[str, Any]) -> tuple[Any, ...]:
    spread = _spread(here)
    if not given["train"] or here.count(spread) == 1:
        return here.call.run(given)
    x, gradient = given["input"], given["grad_out"]
    over, shape = _over(x), _per_channel(x)
    count = prod(here.rule.factors[factor].size for factor in spread)
    mean, inverse = _high(given["save_mean"]), _high(given["save_invstd"])
    off = x - mean.view(shape)
    total = here.reduce(gradient.sum(over, dtype=_wide(x)), "sum", spread)
    along = here.reduce((gradient * off).sum(over), "sum", spread)
    scale = inverse if given["weight"] is None else inverse * given["weight"]
    off.mul_((along * inverse * inverse / count).view(shape))
    gradient_x = (gradient - (total / count).view(shape)).sub_(off)
    del off
    gradient_x = gradient_x.mul_(scale.view(shape)).to(x.dtype)
    kept = _kept(given) if given["weight"] is None else given["weight"].dtype
    made = (gradient_x, (along * inverse).to(kept), total.to(kept))
    return tuple(each if wanted else None for each, wanted in zip(made, given["output_mask"], strict=True))


def _kept(given: dict[str, Any]) -> torch.dtype:
    """The dtype in which torch keeps statistics: that of the weights, and on CUDA at least float32."""
    like = next(given[name] for name in ("weight", "bias", "running_mean", "input") if given.get(name) is not None)
    return _high(like).dtype if like.is_cuda else like.dtype


def _over(x: torch.Tensor) -> list[int]:
    return [0, *range(2, x.dim())]


def _per_channel(x: torch.Tensor) -> list[int]:
    return [1, -1, *[1] * (x.dim() - 2)]


BATCH_NORM_RUNS: Mapping[str, Runs] = {
    "aten.native_batch_norm.default": _forward,
    "aten._native_batch_norm_legit.no_stats": _forward,
    "aten._native_batch_norm_legit_functional.default": _forward,
    "aten.native_batch_norm_backward.default": _backward,
}
