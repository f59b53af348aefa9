"""The device meter on CUDA: the allocator's own peak counter, read at the moments.

What everything but the weights took in a moment is the allocator's peak in it, less the weights that were there. The
counters belong to the host thread's view of the allocator, so no synchronisation is needed to read them.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch

from scrimp.ledger import Ledger


class CudaMeter:
    """The same interface as `CpuMeter`. The budget is a cap on what the allocator reserves, so that passing it is
    torch's out-of-memory error at the very operator."""

    def __init__(self, ledger: Ledger, budget_nbytes: int, device: torch.device) -> None:
        self.ledger = ledger
        self.device = device
        self._others = torch.cuda.memory_allocated(device)  # not the engine's: what was there before it
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, (budget_nbytes + self._others) / total), device)
        torch.cuda.reset_peak_memory_stats(device)

    def __enter__(self) -> CudaMeter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        return None

    def ignore(self, tensor: torch.Tensor) -> None: ...

    def count(self, tensor: torch.Tensor, kind: str = "temporaries") -> None: ...

    def forget(self, tensor: torch.Tensor) -> None: ...

    def expect(self, nbytes: int) -> None: ...

    def mark_saved(self, tensor: torch.Tensor) -> None: ...

    def replayed(self, run: Callable[..., Any]) -> Callable[..., Any]:
        return run  # what is kept to run it again is on the host

    def reset_peak(self) -> int:
        """The most that was allocated beside weights and buffers since the last call."""
        held = sum(self.ledger.now[kind] for kind in ("parameters", "padding", "buffers"))
        peak = max(0, torch.cuda.max_memory_allocated(self.device) - self._others - held)
        torch.cuda.reset_peak_memory_stats(self.device)
        self.ledger.charge("temporaries", peak)  # so that the ledger's own peak knows of it
        self.ledger.free("temporaries", peak)
        return peak

    def close(self) -> None:
        """Lift the cap: it holds for the whole process."""
        torch.cuda.set_per_process_memory_fraction(1.0, self.device)
