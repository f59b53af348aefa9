"""Attention on the device of its operands, by private operators of torch.

A captured graph has the CPU's flash operator, whatever the device (`scrimp/capture/trace/fakes.py`). On CUDA these functions have
the operator's signature and results, so that a plan made on any machine keeps its tensors:

    cudnn, flash   bf16 and fp16 without a mask; which of them, torch chooses as in `scaled_dot_product_attention`
    efficient      the others; the kernel pads the rows of its log-sum-exp, which is cut and padded again here

All take head dims that are multiples of 8; others are padded. No kernel draws: the CPU's operator has no dropout. All have the
same log-sum-exp, so that a backward need not use the kernel of its forward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
CPU_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
FLASH = torch.ops.aten._scaled_dot_product_flash_attention.default
FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
CUDNN = torch.ops.aten._scaled_dot_product_cudnn_attention.default
CUDNN_BACKWARD = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default
EFFICIENT = torch.ops.aten._scaled_dot_product_efficient_attention.default
EFFICIENT_BACKWARD = torch.ops.aten._scaled_dot_product_efficient_attention_backward.default

WIDTH = 8  # head dims are multiples of it
LARGEST = {CUDNN: 128, FLASH: 256}  # head dims
CUDNN_CHOICE = 3  # of torch's enumeration of kernels
ROWS, COLUMNS = 32, 16  # the efficient kernel's log-sum-exp has rows in multiples of the first, its mask lies in memory so


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """The result, and the log-sum-exp of each row."""
    if not query.is_cuda:
        made: tuple[Tensor, Tensor] = CPU(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)
        return made
    width, scale = value.shape[-1], _scale(query, scale)
    q, k, v = map(_wide, (query, key, value))
    kernel = _kernel(q, k, v, is_causal, attn_mask)
    if kernel is CUDNN:
        out, log_sum, *_ = CUDNN(q, k, v, None, True, 0.0, is_causal, scale=scale)
        log_sum = log_sum.view(query.shape[:3])
    elif kernel is FLASH:
        out, log_sum, *_ = FLASH(q, k, v, 0.0, is_causal, scale=scale)
    else:
        k, v = (_repeated(each, query) for each in (k, v))
        out, log_sum, *_ = EFFICIENT(q, k, v, _bias(attn_mask, query, key), True, 0.0, is_causal, scale=scale)
        if log_sum.shape[-1] != query.shape[2]:
            log_sum = log_sum[..., : query.shape[2]].contiguous()
    return out[..., :width], log_sum


def attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    """The gradients of query, key and value."""
    if not query.is_cuda:
        made: tuple[Tensor, ...] = CPU_BACKWARD(
            grad_out, query, key, value, out, logsumexp, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
        )
        return made
    scale = _scale(query, scale)
    given, q, k, v, result = map(_wide, (grad_out, query, key, value, out))
    drawn = query.new_empty((), dtype=torch.int64)  # the random state, which is not read without dropout
    rows, columns = query.shape[2], key.shape[2]
    kernel = _kernel(q, k, v, is_causal, attn_mask)
    if kernel is CUDNN:
        log_sum = logsumexp.contiguous().unsqueeze(-1)
        gradients = CUDNN_BACKWARD(
            given, q, k, v, result, log_sum, drawn, drawn, None, None, None, rows, columns, 0.0, is_causal, scale=scale
        )
    elif kernel is FLASH:
        log_sum = logsumexp.contiguous()
        gradients = FLASH_BACKWARD(
            given, q, k, v, result, log_sum, None, None, rows, columns, 0.0, is_causal, drawn, drawn, scale=scale
        )
    else:
        bias, log_sum = _bias(attn_mask, query, key), pad(logsumexp, (0, -rows % ROWS), value=torch.inf).contiguous()
        k, v = (_repeated(each, query) for each in (k, v))
        gradients = EFFICIENT_BACKWARD(
            given, q, k, v, bias, result, log_sum, drawn, drawn, 0.0, [True, True, True, False], is_causal, scale=scale
        )[:3]
    return tuple(_summed(gradient, of)[..., : of.shape[-1]] for gradient, of in zip(gradients, (query, key, value), strict=True))


def _kernel(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, mask: Tensor | None) -> Any:
    """Flash counts the rows of a causal mask from the last, the others from the first."""
    width, square = query.shape[-1], not is_causal or query.shape[2] == key.shape[2]
    if mask is not None or not square or query.dtype not in (torch.bfloat16, torch.float16) or width != value.shape[-1]:
        return EFFICIENT
    if width <= LARGEST[CUDNN]:
        grouped = query.shape[1] != key.shape[1]
        chosen = torch._fused_sdp_choice(query, key, value, None, 0.0, is_causal, enable_gqa=grouped)
        if chosen == CUDNN_CHOICE:
            return CUDNN
    return FLASH if width <= LARGEST[FLASH] else EFFICIENT


def _scale(query: Tensor, scale: float | None) -> float:
    return float(query.shape[-1] ** -0.5) if scale is None else scale


def _wide(tensor: Tensor) -> Tensor:
    missing = -tensor.shape[-1] % WIDTH
    return pad(tensor, (0, missing)) if missing else tensor


def _repeated(tensor: Tensor, query: Tensor) -> Tensor:
    """Keys or values, once for each head of the query."""
    share = query.shape[1] // tensor.shape[1]
    return tensor if share == 1 else tensor.repeat_interleave(share, 1)


def _summed(gradient: Tensor, of: Tensor) -> Tensor:
    """Over the query's heads that share a head of `of`."""
    shared = of.shape[1]
    return (
        gradient if gradient.shape[1] == shared else gradient.reshape(gradient.shape[0], shared, -1, *gradient.shape[2:]).sum(2)
    )


def _bias(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    if mask is None:
        return None
    columns = key.shape[2]
    aligned = pad(mask.to(query.dtype), (0, -mask.shape[-1] % COLUMNS))[..., : mask.shape[-1]]
    return aligned.expand(query.shape[0], query.shape[1], query.shape[2], columns)


FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "aten._scaled_dot_product_flash_attention_for_cpu.default": attention,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": attention_backward,
}
