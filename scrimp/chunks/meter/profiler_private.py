"""torch's legacy profiler, by private names: the only one that can start and stop inside a step, many times, without output.

Where the names are missing, or another profiler runs on this thread, `listen` returns False.
"""

from __future__ import annotations

from typing import Any

import torch

_autograd: Any = torch._C._autograd
_profiler: Any = getattr(torch._C, "_profiler", None)


def _config() -> Any:
    """Records memory of CPU operators; no shapes, stacks, flops or modules."""
    try:
        return _profiler.ProfilerConfig(
            _profiler.ProfilerState.CPU, False, True, False, False, False, _profiler._ExperimentalConfig()
        )
    except (AttributeError, TypeError):
        return None


_CONFIG = _config()
_NAMES = ("_enable_profiler_legacy", "_disable_profiler_legacy", "_profiler_enabled")
AVAILABLE = _CONFIG is not None and all(hasattr(_autograd, name) for name in _NAMES)


def listen() -> bool:
    """Start to record this thread's allocations; False if that is not possible."""
    if not AVAILABLE or _autograd._profiler_enabled():
        return False
    _autograd._enable_profiler_legacy(_CONFIG)
    return True


def heard() -> list[int]:
    """Stop recording; returns the bytes allocated since `listen` in order of time, frees as negative numbers."""
    records = _autograd._disable_profiler_legacy()
    return [event.cpu_memory_usage() for thread in records for event in thread if event.kind() == "memory_alloc"]
