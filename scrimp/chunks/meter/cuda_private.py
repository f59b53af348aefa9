"""torch's allocator settings, which have no public API yet."""

from __future__ import annotations

import os

import torch

SET = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
USERS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def grow_segments() -> bool:
    """Enables expandable segments, so that fetched and evicted layers fragment memory little; returns whether it did. A user's
    own settings are left alone."""
    if SET is None or any(name in os.environ for name in USERS):
        return False
    SET("expandable_segments:True")
    return True
