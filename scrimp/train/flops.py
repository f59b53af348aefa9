"""FLOPs of a model's forward and backward, counted on meta."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from scrimp.train.data.batches import arguments, on_meta


def flops_of(model: nn.Module, sample: Any) -> float | None:
    """Of one sample: matrix products, convolutions and attention, without recomputation. None where the model does not run on
    meta. `model` is not used afterwards."""
    args, kwargs = arguments(on_meta(sample, 1))
    try:
        model = model.to("meta")
        with FlopCounterMode(display=False) as counter:
            out = model(*args, **kwargs)
            loss = out if isinstance(out, torch.Tensor) else out["loss"]
            loss.backward()
    except Exception:  # a model may need values; then the line has no MFU
        return None
    return float(counter.get_total_flops())
