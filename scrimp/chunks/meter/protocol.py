"""What a meter of device memory does. `CpuMeter` sees every storage that an operator makes; `CudaMeter` reads the allocator."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Protocol

import torch


class Meter(Protocol):
    """Metered code runs inside `with meter:`. The meter charges the ledger, and reports when the total passes the budget."""

    budget_nbytes: int

    def __enter__(self) -> Any: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /) -> Any: ...

    @property
    def live_nbytes(self) -> int:
        """What is allocated now, besides the engine's own."""

    def begin(self) -> None:
        """The engine is built: what is there now is its own."""

    def allowing(self, nbytes: int) -> AbstractContextManager[None]:
        """With another budget for a while."""

    def ignore(self, tensor: torch.Tensor) -> None:
        """A storage of the engine's own, which its owner charges."""

    def count(self, tensor: torch.Tensor, kind: str = "temporaries") -> None:
        """A storage that the meter did not see being made."""

    def lend(self, tensor: torch.Tensor) -> None:
        """A tensor of the batch: counted while the step runs."""

    def forget(self, tensor: torch.Tensor) -> None:
        """The end of `lend`."""

    def expect(self, nbytes: int) -> None:
        """Make room for what is about to be allocated."""

    def aside(self, run: Callable[[], None], nbytes: int) -> None:
        """Run something whose allocations are known, and not the model's."""

    def mark_saved(self, tensor: torch.Tensor) -> None:
        """Autograd keeps it: an activation."""

    def replayed(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """A function that torch's checkpoint will run again, without what checkpoint keeps for itself."""

    def reset_peak(self) -> int:
        """The peak since the last reset."""

    def largest(self) -> tuple[int, tuple[int, ...]]:
        """Bytes and shape of the largest live tensor."""

    def close(self) -> None:
        """Lift the budget."""
