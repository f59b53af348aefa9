"""The only module that knows where torch keeps hooks that run for every module."""

from __future__ import annotations

import torch.nn.modules.module as of_torch

NAMES = ("_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks", "_global_backward_pre_hooks")


def hooks_of_all_modules() -> bool:
    return any(getattr(of_torch, name) for name in NAMES)
