"""Modules that torch.compile has taken, known by private names of torch. None of them exists while its compiler is not loaded,
so that to ask costs nothing then."""

from __future__ import annotations

import sys

from torch import nn

COMPILER = "torch._dynamo.eval_frame"
CALL, ORIGINAL, DISABLED = "_compiled_call_impl", "_torchdynamo_orig_callable", "_torchdynamo_disable"


def compiled(model: nn.Module) -> tuple[str, str] | None:
    """The first module that is compiled: its path, and how it was done, in words."""
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
