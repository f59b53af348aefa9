"""The batch: its signature, its split into micro-batches, its transfer to the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from scrimp.errors import RunError

Signature = tuple[tuple[str, tuple[int, ...]], ...]


def signature(args: Any, kwargs: Any) -> Signature:
    """The key of a plan: dtypes and shapes of the tensors, in order. They decide how much memory a step takes."""
    leaves = tree_leaves((args, kwargs))
    return tuple((str(leaf.dtype), tuple(leaf.shape)) for leaf in leaves if isinstance(leaf, torch.Tensor))


def covers(larger: Signature, smaller: Signature) -> bool:
    """Whether the larger batch needs at least the memory of the smaller: the same tensors, no dim smaller."""
    return len(larger) == len(smaller) and all(
        a[0] == b[0] and len(a[1]) == len(b[1]) and all(x >= y for x, y in zip(a[1], b[1], strict=True))
        for a, b in zip(larger, smaller, strict=True)
    )


def parts(args: Any, kwargs: Any, count: int) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Splits the batch into equal parts along dim 0 of every tensor."""
    if count == 1:
        yield args, kwargs
        return
    leaves, spec = tree_flatten((args, kwargs))
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and (leaf.dim() == 0 or leaf.shape[0] % count):
            raise RunError(
                f"a tensor of shape {tuple(leaf.shape)} cannot be split into micro_batches={count} equal parts on dim 0"
            )
    for k in range(count):
        part = [leaf.chunk(count)[k] if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        part_args, part_kwargs = tree_unflatten(part, spec)
        yield part_args, part_kwargs


def to_device(args: Any, kwargs: Any, device: torch.device, dtype: torch.dtype | None) -> tuple[Any, Any]:
    """Moves inputs to the device; floating-point ones are cast to `dtype`, the precision of the weights, unless it is None."""

    def move(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return leaf.to(device, dtype if dtype is not None and leaf.is_floating_point() else leaf.dtype)

    moved: tuple[Any, Any] = tree_map(move, (args, kwargs))
    return moved


def which(model: nn.Module, args: tuple[Any, ...]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The function to run and its arguments: the first argument if it is callable, else the model."""
    if args and callable(args[0]):
        return args[0], args[1:]
    return model, args


def loss_of(out: Any) -> torch.Tensor:
    """Finds the scalar loss in the model's output."""
    loss = out
    if isinstance(out, dict):
        loss = out.get("loss")
    elif not isinstance(out, torch.Tensor):
        loss = getattr(out, "loss", None)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise RunError(
            f"the model, or the function in its place, returned {type(out).__name__}, which is no scalar loss and has no `loss`; "
            "give Engine(loss=function)"
        )
    return loss.reshape(())
