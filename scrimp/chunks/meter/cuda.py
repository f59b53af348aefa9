"""The device meter on CUDA: the allocator's own peak counter, read at the moments and whenever what is held changes.

What everything but the weights took in between is the allocator's peak, less the weights that were there. The counters are
the host's view of the allocator, so no synchronisation is needed to read them.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch

from scrimp.chunks.meter.cuda_private import grow_segments
from scrimp.ledger import Ledger

HELD = ("parameters", "gradients", "optimizer", "residual", "padding", "buffers")  # what the ledger is told by its owners


_capped: dict[torch.device, object] = {}  # whose cap it is, the last meter's


def _lift(device: torch.device, token: object) -> None:
    if _capped.get(device) is token:
        del _capped[device]
        torch.cuda.set_per_process_memory_fraction(1.0, device)


class CudaMeter:
    """The same interface as `CpuMeter`. The budget is a cap on what the allocator reserves, so that passing it is
    torch's out-of-memory error at the very operator."""

    def __init__(self, ledger: Ledger, budget_nbytes: int, device: torch.device) -> None:
        grow_segments()
        torch.cuda.init()  # type: ignore[no-untyped-call]
        self.ledger = ledger
        self.device = device
        self.budget_nbytes = budget_nbytes
        self._token = object()
        weakref.finalize(self, _lift, device, self._token).atexit = False  # an engine that nobody closed
        gc.collect()
        torch.cuda.empty_cache()
        # Between what others have there: reserved already, and hardly of use to anyone.
        self._gaps = max(0, torch.cuda.memory_reserved(device) - self._allocated("current"))
        self.begin()

    def begin(self) -> None:
        """From here on; what is allocated now and is not the engine's was there before it. What others left in the
        allocator's cache must not serve beyond the cap."""
        gc.collect()
        torch.cuda.empty_cache()
        self._peak = 0
        self._others = self._allocated("current") - self._held()  # not the engine's: what was there before it
        self._cap()
        torch.cuda.reset_peak_memory_stats(self.device)

    def _cap(self) -> None:
        total = torch.cuda.get_device_properties(self.device).total_memory
        share = min(1.0, (self.budget_nbytes + self._others + self._gaps) / total)
        _capped[self.device] = self._token
        torch.cuda.set_per_process_memory_fraction(share, self.device)

    @contextmanager
    def allowing(self, nbytes: int) -> Iterator[None]:
        """With another budget for a while."""
        before, self.budget_nbytes = self.budget_nbytes, nbytes
        torch.cuda.empty_cache()
        self._cap()
        try:
            yield
        finally:
            self.budget_nbytes = before
            torch.cuda.empty_cache()
            self._cap()

    def __enter__(self) -> CudaMeter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        return None

    @property
    def live_nbytes(self) -> int:
        return max(0, self._allocated("current") - self._others - self._held())

    def ignore(self, tensor: torch.Tensor) -> None: ...

    def count(self, tensor: torch.Tensor, kind: str = "temporaries") -> None: ...

    def lend(self, tensor: torch.Tensor) -> None: ...

    def forget(self, tensor: torch.Tensor) -> None: ...

    def expect(self, nbytes: int) -> None: ...

    def aside(self, run: Callable[[], None], nbytes: int) -> None:
        run()  # the allocator sees everything

    def mark_saved(self, tensor: torch.Tensor) -> None: ...

    def replayed(self, run: Callable[..., Any]) -> Callable[..., Any]:
        return run  # what is kept to run it again is on the host

    def before_change(self) -> None:
        """What is held is about to change: the peak until now belongs to what is held now."""
        peak = max(0, self._allocated("peak") - self._others - self._held())
        torch.cuda.reset_peak_memory_stats(self.device)
        self._peak = max(self._peak, peak)
        self.ledger.charge("temporaries", peak)  # so that the ledger's own peak knows of it
        self.ledger.free("temporaries", peak)

    def reset_peak(self) -> int:
        """The most that was allocated beside what is held since the last call."""
        self.before_change()
        peak, self._peak = self._peak, 0
        return peak

    def largest(self) -> tuple[int, tuple[int, ...]]:
        return 0, ()  # the allocator knows no shapes

    def close(self) -> None:
        """Lift the cap: it holds for the whole process."""
        _lift(self.device, self._token)

    def _allocated(self, when: str) -> int:
        """Asked for in every layer; the function of that name makes a table of all counters first, ten times as long."""
        return torch.cuda.memory_stats_as_nested_dict(self.device)["allocated_bytes"]["all"][when]  # type: ignore[no-any-return]

    def _held(self) -> int:
        return sum(self.ledger.now[kind] for kind in HELD)
