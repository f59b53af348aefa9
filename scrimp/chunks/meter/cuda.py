"""The device meter on CUDA: reads the allocator's peak counter at each schedule step, and before resident bytes change.

The memory of everything but the weights is the allocator's peak minus the resident weights. The counters are kept on the host, so
reading them needs no synchronisation.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import TracebackType
from typing import Any

import torch

from scrimp.chunks.meter.cuda_private import grow_segments
from scrimp.ledger import Ledger

HELD = ("parameters", "gradients", "optimizer", "residual", "padding", "buffers")  # kinds that their owners charge


_capped: dict[torch.device, object] = {}  # the meter that set the cap last


def _lift(device: torch.device, token: object) -> None:
    if _capped.get(device) is token:
        del _capped[device]
        torch.cuda.set_per_process_memory_fraction(1.0, device)


class CudaMeter:
    """Implements `Meter`. The budget is a cap on what the allocator reserves, so exceeding it raises torch's out-of-memory error
    at the operator itself."""

    def __init__(self, ledger: Ledger, budget_nbytes: int, device: torch.device) -> None:
        grow_segments()
        torch.cuda.init()  # type: ignore[no-untyped-call]
        self.ledger = ledger
        self.device = device
        self.budget_nbytes = budget_nbytes
        self._token = object()
        weakref.finalize(self, _lift, device, self._token).atexit = False  # for an engine that was not closed
        gc.collect()
        torch.cuda.empty_cache()
        # Free parts of blocks that others have allocated: reserved, but hardly usable.
        self._gaps = max(0, torch.cuda.memory_reserved(device) - self._allocated("current"))
        self.begin()

    def begin(self) -> None:
        """Start metering. Bytes that are allocated now and are not the engine's belong to others. The allocator's cache is
        emptied, because blocks in it would not count against the cap."""
        gc.collect()
        torch.cuda.empty_cache()
        self._peak = 0
        self._others = self._allocated("current") - self._held()  # allocated before the engine
        self._cap()
        torch.cuda.reset_peak_memory_stats(self.device)

    def _cap(self) -> None:
        total = torch.cuda.get_device_properties(self.device).total_memory
        share = min(1.0, (self.budget_nbytes + self._others + self._gaps) / total)
        _capped[self.device] = self._token
        torch.cuda.set_per_process_memory_fraction(share, self.device)

    @contextmanager
    def allowing(self, nbytes: int) -> Iterator[None]:
        """Inside, another budget applies."""
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

    def as_one(self, key: Hashable, given: torch.Tensor, run: Callable[[], torch.Tensor], kind: str, rest: str) -> torch.Tensor:
        return run()  # the allocator knows no kinds

    def counting(self, kind: str) -> AbstractContextManager[None]:
        return nullcontext()

    def mark(self, tensor: torch.Tensor, kind: str) -> None: ...

    def lend(self, tensor: torch.Tensor) -> None: ...

    def forget(self, tensor: torch.Tensor) -> None: ...

    def expect(self, nbytes: int) -> None: ...

    def aside(self, run: Callable[[], None], nbytes: int) -> None:
        run()  # the allocator sees everything

    def mark_saved(self, tensor: torch.Tensor) -> None: ...

    def replayed(self, run: Callable[..., Any]) -> Callable[..., Any]:
        return run  # what checkpoint saves for the recomputation is on the host

    def before_change(self) -> None:
        """Resident bytes are about to change: attribute the peak until now to the current ones."""
        peak = max(0, self._allocated("peak") - self._others - self._held())
        torch.cuda.reset_peak_memory_stats(self.device)
        self._peak = max(self._peak, peak)
        self.ledger.charge("temporaries", peak)  # raises the ledger's own peak
        self.ledger.free("temporaries", peak)

    def reset_peak(self) -> int:
        """Peak bytes besides the resident ones since the last call."""
        self.before_change()
        peak, self._peak = self._peak, 0
        return peak

    def settle(self) -> None:
        self.before_change()

    def largest(self) -> tuple[int, tuple[int, ...]]:
        return 0, ()  # the allocator does not know shapes

    def close(self) -> None:
        """Lift the cap, which applies to the whole process."""
        _lift(self.device, self._token)

    def _allocated(self, when: str) -> int:
        """Reads one counter, in every layer. `torch.cuda.memory_allocated` builds a table of all counters, which takes ten times
        as long."""
        return torch.cuda.memory_stats_as_nested_dict(self.device)["allocated_bytes"]["all"][when]  # type: ignore[no-any-return]

    def _held(self) -> int:
        return sum(self.ledger.now[kind] for kind in HELD)
