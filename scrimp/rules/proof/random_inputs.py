"""Random tensors that an operator accepts: indices within range, some ignored labels, positive variances."""

from __future__ import annotations

from typing import Any

import torch

from scrimp.rules.core.call import Call, call

_POSITIVE = ("rstd", "save_invstd", "running_var", "total_weight")  # arguments
_OF_POSITIVE = ("log", "log1p", "log2", "log10", "sqrt", "rsqrt", "pow")  # operators
_WRITES_ONCE = ("scatter", "index_put")  # where two rows are written to one place, either may win


def sample(bound: Call, *, seed: int, floats: torch.dtype, device: str) -> list[torch.Tensor]:
    """One tensor for each input, in order. A repeated value is one tensor."""
    generator = torch.Generator().manual_seed(seed)
    made: dict[str, torch.Tensor] = {}
    for index, (name, shape, dtype) in enumerate(zip(bound.op.inputs, bound.shapes, bound.dtypes, strict=True)):
        if name not in made:
            made[name] = _one(bound, _argument(bound, index), shape, getattr(torch, dtype), floats, generator).to(device)
    return _of_forward(bound, [made[name] for name in bound.op.inputs])


def _argument(bound: Call, index: int) -> str:
    """The name of the argument that an input belongs to."""
    lists = (name for name, given in bound.arguments.items() if isinstance(given, tuple) and index in bound.all_at(name))
    return next((name for name in bound.arguments if bound.at(name) == index), None) or next(lists)


def _one(
    bound: Call, name: str, shape: tuple[int, ...], dtype: torch.dtype, floats: torch.dtype, generator: torch.Generator
) -> torch.Tensor:
    operator = bound.op.target.split(".")[1]
    if dtype == torch.bool:
        return torch.rand(shape, generator=generator) < 0.5
    if not dtype.is_floating_point:
        return _whole_numbers(bound, operator, name, shape, generator).to(dtype)
    if name in _POSITIVE or operator in _OF_POSITIVE or operator == "bernoulli":
        return torch.rand(shape, generator=generator, dtype=torch.float64).mul(0.8).add(0.1).to(floats)
    tensor = torch.randn(shape, generator=generator, dtype=torch.float64)
    if operator == "_safe_softmax" and tensor.numel():
        along = tensor.movedim(bound.arguments["dim"], -1)
        along.masked_fill_(torch.rand(along.shape[:-1], generator=generator).unsqueeze(-1) < 0.3, -torch.inf)
    return tensor.to(floats)


def _whole_numbers(bound: Call, operator: str, name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    if operator.startswith("nll_loss") and name == "target":
        scores = bound.shape("self")
        labels = torch.randint(scores[0 if len(scores) == 1 else 1], shape, generator=generator)
        return labels.masked_fill(torch.rand(shape, generator=generator) < 0.3, bound.arguments["ignore_index"])
    if operator == "_grouped_mm":  # ends of groups, the last at the end
        rows = bound.shape("self")[0 if len(bound.shape("mat2")) == 3 else 1]
        ends = torch.randint(rows + 1, shape, generator=generator).sort().values
        ends[-1:] = rows
        return ends
    if operator.startswith("ragged"):  # ends of the rows of each expert; padding follows
        return torch.randint(bound.shape("x")[2] + 1, shape, generator=generator).sort().values
    if name not in ("index", "indices") or "pool" in operator:
        return torch.randint(bound.arguments["num_classes"] if operator == "one_hot" else 5, shape, generator=generator)
    limit = _limit(bound, operator, shape)
    if operator in _WRITES_ONCE and not bound.arguments.get("accumulate", False):
        along = bound.arguments.get("dim", 0)
        spread = list(shape)
        spread[along] = limit
        return torch.rand(spread, generator=generator).argsort(along).narrow(along, 0, shape[along])
    backwards = "index" in operator and "dim" not in bound.arguments  # these also accept negative indices
    return torch.randint(-limit if backwards else 0, limit, shape, generator=generator)


def _limit(bound: Call, operator: str, shape: tuple[int, ...]) -> int:
    """The number of rows to choose from."""
    if operator == "embedding_dense_backward":
        return int(bound.arguments["num_weights"])
    if operator == "embedding":
        return bound.shape("weight")[0]
    if "dim" in bound.arguments:
        return bound.shape("self")[int(bound.arguments["dim"])]
    return min(size for size, at in zip(bound.shape("self"), bound.all_at("indices"), strict=False) if at is not None)


def _of_forward(bound: Call, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Some backward operators need the results of their forward."""
    given: dict[str, Any] = bound.filled(tensors)
    target = bound.op.target
    if target == "aten.max_pool2d_with_indices_backward.default":
        made = dict(zip(("", "indices"), call("aten.max_pool2d_with_indices.default", given), strict=True))
    elif target.startswith("aten._scaled_dot_product") and target.endswith("_backward.default"):
        forward = target.replace("_backward.default", ".default")
        given = {"compute_log_sumexp": True, "return_debug_mask": False, **given}
        lengths = () if "efficient" in target else ("cum_seq_q", "cum_seq_k", "", "")
        names = ("out", "logsumexp", *lengths, "philox_seed", "philox_offset")
        made = dict(zip(names, call(forward, given), strict=False))
    else:
        return tensors
    for name, tensor in made.items():
        at = bound.at(name)
        if at is not None:
            tensors[at] = tensor
    return tensors
