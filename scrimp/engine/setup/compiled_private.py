"""Detects modules that torch.compile has wrapped, by private names of torch. They exist only once its compiler is loaded, so the
check is free before that."""

from __future__ import annotations

import sys

from torch import nn

COMPILER = "torch._dynamo.eval_frame"
CALL, ORIGINAL, DISABLED = "_compiled_call_impl", "_torchdynamo_orig_callable", "_torchdynamo_disable"


def compiled(model: nn.Module) -> tuple[str, str] | None:
    """The first compiled module: its path, and the call that compiled it."""
    loaded = sys.modules.get(COMPILER)
    if loaded is None:
        return None
    for path, module in model.named_modules():
        if isinstance(module, loaded.OptimizedModule):
            return path, "torch.compile(module)"
        if getattr(module, CALL, None) is not None:
            return path, "module.compile()"
        if hasattr(module.forward, ORIGINAL) and not getattr(module.forward, DISABLED, False):
            return path, "torch.compile(module.forward)"
    return None
