"""Cross-entropy of a language-model head that never materialises all logits, and the hint that recommends it.

Logits of (tokens, vocabulary), their softmax and their gradient often set the peak memory of a step. But each token's loss and
gradients depend only on its own row. So the forward computes loss and gradients chunk by chunk, and saves the gradients for
backward in place of the logits. It does not save the weight.
"""

from __future__ import annotations

from collections.abc import Collection
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from scrimp.errors import RunError
from scrimp.ledger import format_nbytes

CHUNK = 2048
HINT_SHARE = 0.25  # of the peak: smaller logits get no hint


def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    chunk: int = CHUNK,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> Tensor:
    """`F.cross_entropy(F.linear(hidden, weight, bias).float(), targets)`, with the logits of only `chunk` tokens at a time.

    `hidden` is (..., dim), `weight` (vocabulary, dim), `targets` (...). Logits have the inputs' dtype, loss and softmax at
    least fp32. The forward computes gradients only for inputs that require them, and only if gradients are enabled. They serve
    one backward. Call this in the forward of the module that owns the weight, because the weight is on the device there.

    >>> import scrimp, torch
    >>> hidden, weight = torch.ones(6, 4), torch.zeros(8, 4)
    >>> loss = scrimp.chunked_cross_entropy(hidden, weight, torch.zeros(6, dtype=torch.long), chunk=2)
    >>> round(float(loss), 4)  # log(8)
    2.0794
    """
    _validate(hidden, weight, targets, bias, chunk, reduction)
    loss: Tensor = _ChunkedCrossEntropy.apply(
        hidden, weight, bias, targets.flatten(), chunk, ignore_index, reduction == "mean", torch.is_grad_enabled()
    )  # type: ignore[no-untyped-call]
    return loss


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        chunk: int,
        ignore_index: int,
        mean: bool,
        with_gradients: bool,  # autograd is always disabled inside a Function's forward
    ) -> Tensor:
        for_hidden, for_weight, for_bias = (with_gradients and needed for needed in ctx.needs_input_grad[:3])
        tokens = hidden.reshape(-1, hidden.shape[-1])
        wide = torch.promote_types(tokens.dtype, torch.float32)  # loss and sums over chunks
        of_hidden = tokens.new_empty(tokens.shape) if for_hidden else None
        of_weight = torch.zeros_like(weight, dtype=wide) if for_weight else None
        of_bias = torch.zeros_like(bias, dtype=wide) if for_bias and bias is not None else None
        keep = targets != ignore_index
        count = keep.sum() if mean else keep.new_ones((), dtype=torch.int64)
        share = keep.to(wide) / count.clamp(min=1)
        index = targets.where(keep, 0)
        total = tokens.new_zeros((), dtype=wide)
        for start in range(0, len(tokens), chunk):
            span = slice(start, start + chunk)
            part, at, factor = tokens[span], index[span, None], share[span, None]
            # One buffer holds first the logits, then their exponentials, then their gradient.
            rows = functional.linear(part, weight, bias).to(wide)
            rows.sub_(rows.amax(-1, keepdim=True))
            picked = rows.gather(1, at)
            sums = rows.exp_().sum(-1, keepdim=True)
            total += (sums.log() - picked).where(keep[span, None], 0).sum()
            if for_hidden or for_weight or for_bias:
                rows.mul_(factor / sums).scatter_add_(1, at, -factor)
                _add(rows, part, weight, of_bias, None if of_hidden is None else of_hidden[span], of_weight)
            del rows  # free it before the next chunk allocates its own
        ctx.save_for_backward(
            None if of_hidden is None else of_hidden.view(hidden.shape),
            None if of_weight is None else of_weight.to(weight.dtype),
            None if of_bias is None or bias is None else of_bias.to(bias.dtype),
        )
        ctx.spent = False
        return total / count  # NaN (0/0) where all targets are ignored, as in torch

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor | None, ...]:
        gradients: tuple[Tensor | None, ...] = ctx.saved_tensors
        if ctx.spent:
            raise RunError(
                "a second backward through one chunked_cross_entropy: its gradients were made in the forward and given away "
                "by the first; call it again, or add the losses up before backward"
            )
        ctx.spent = True
        # On the CPU reading the factor is free; elsewhere it would wait for the device. There a shape of (1,), unlike a
        # scalar's, keeps a 16-bit gradient from rounding the factor to 16 bits first.
        scale = outer.item() if outer.device.type == "cpu" else outer.reshape(1)
        if not (isinstance(scale, float) and scale == 1):
            for gradient in gradients:
                if gradient is not None:
                    gradient.mul_(scale)
        return *gradients, None, None, None, None, None


def _add(
    rows: Tensor, part: Tensor, weight: Tensor, of_bias: Tensor | None, of_part: Tensor | None, of_weight: Tensor | None
) -> None:
    """Adds a chunk's contribution to the gradients; `rows` is the gradient of its logits."""
    if of_bias is not None:
        of_bias += rows.sum(0)
    rows = rows.to(part.dtype)
    if of_part is not None:
        torch.mm(rows, weight, out=of_part)
    if of_weight is None:
        return
    if of_weight.dtype == rows.dtype:
        of_weight.addmm_(rows.T, part)
    else:
        of_weight += rows.T @ part


def logits_hint(peak_nbytes: int, largest_nbytes: int, largest_shape: tuple[int, ...], vocabs: Collection[int]) -> str | None:
    """Advice for a peak whose largest tensor looks like logits: its last dim is one of `vocabs`, the output sizes of the
    model's largest matrices. None if the tensor is something else, or if chunking would not help."""
    if not largest_shape or largest_shape[-1] not in vocabs or largest_nbytes < HINT_SHARE * peak_nbytes:
        return None
    *leading, vocab = largest_shape
    tokens = prod(leading)
    if not tokens or not vocab:
        return None
    chunk = min(CHUNK, max(1, tokens // 8))
    itemsize = largest_nbytes // (tokens * vocab)
    instead = chunk * vocab * (max(itemsize, 4) + (itemsize if itemsize < 4 else 0))
    if instead >= largest_nbytes:
        return None
    call = "scrimp.chunked_cross_entropy(hidden, weight, targets" + ("" if chunk == CHUNK else f", chunk={chunk}") + ")"
    return (
        f"the largest tensor at the peak has shape {largest_shape} and {format_nbytes(largest_nbytes)}, "
        f"{100 * largest_nbytes / max(peak_nbytes, 1):.0f} % of the peak: logits set the peak; "
        f"{call} would take {format_nbytes(instead)} in its place"
    )


def _validate(hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, chunk: int, reduction: str) -> None:
    shapes = f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)}, targets {tuple(targets.shape)}"
    if weight.dim() != 2 or not hidden.dim() or hidden.shape[-1] != weight.shape[1] or hidden.shape[:-1] != targets.shape:
        raise RunError(f"chunked_cross_entropy of {shapes}: they must be (..., dim), (vocabulary, dim) and (...)")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise RunError(f"chunked_cross_entropy of {shapes} with a bias {tuple(bias.shape)}: it must be ({weight.shape[0]},)")
    dtypes = {tensor.dtype for tensor in (hidden, weight, bias) if tensor is not None}
    if len(dtypes) > 1 or not dtypes <= {torch.float64, torch.float32, torch.bfloat16}:
        raise RunError(
            f"chunked_cross_entropy of {', '.join(sorted(map(str, dtypes)))}: hidden, weight and bias must share one dtype, "
            "float64, float32 or bfloat16 (gradients of a mean are too small for float16)"
        )
    if targets.dtype != torch.int64:
        raise RunError(f"chunked_cross_entropy takes class numbers of torch.int64 as targets, not {targets.dtype}")
    if isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1:
        raise RunError(f"chunk={chunk!r}: it is the number of tokens whose logits are held at a time, 1 or more")
    if reduction not in ("mean", "sum"):
        raise RunError(
            f"reduction={reduction!r} is not one of 'mean', 'sum' (with 'none' the gradients could not be made in the forward)"
        )
