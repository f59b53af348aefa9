"""Patches Hugging Face models for tracing: no key-value caches, and no mask where attention is plain causal.

While it is traced, their library cannot see whether a batch is padded or packed, and so makes a mask of batch x sequence x
sequence, of which every layer then keeps a copy in floats. We inspect the batch before the trace.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from torch import Tensor, nn

from scrimp.layers import no_caches


@contextmanager
def as_in_training(model: nn.Module, inputs: Mapping[str, Any]) -> Iterator[None]:
    """`inputs` by name."""
    with ExitStack() as stack:
        stack.enter_context(no_caches(model))
        masks = sys.modules.get("transformers.masking_utils")
        if masks is not None and _plain(inputs):
            table = masks.ALL_MASK_ATTENTION_FUNCTIONS
            stack.enter_context(mock.patch.object(masks, "find_packed_sequence_indices", _not_packed))
            original = table["sdpa"]
            table["sdpa"] = _skipping(original)
            stack.callback(table.__setitem__, "sdpa", original)
        yield


def _plain(inputs: Mapping[str, Any]) -> bool:
    """Whether no row is padded or packed, as far as can be seen without computing on the device."""
    if inputs.get("position_ids") is not None:
        return False
    mask = inputs.get("attention_mask")
    return mask is None or (isinstance(mask, Tensor) and mask.device.type != "meta" and bool(mask.bool().all()))


def _not_packed(position_ids: Tensor) -> None:
    return None


def _skipping(original: Any) -> Any:
    """Behaves like their function outside of tracing: no mask where attention is causal or full over the whole length."""

    def mask(batch_size: int, q_length: int, kv_length: int, *args: Any, **kwargs: Any) -> Any:
        window = kwargs.get("local_size")
        short = window is None or kv_length < window
        causal = kwargs.get("allow_is_causal_skip", True) and q_length == kv_length
        if short and (causal or kwargs.get("allow_is_bidirectional_skip", False)):
            return None
        return original(batch_size, q_length, kv_length, *args, **kwargs)

    return mask
