"""The interface of a device meter. `CpuMeter` counts every storage that an operator makes; `CudaMeter` reads the allocator."""

from __future__ import annotations

from collections.abc import Callable, Hashable
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
        """Bytes allocated now, besides the engine's own."""

    def begin(self) -> None:
        """The engine is built: everything allocated now is its own."""

    def allowing(self, nbytes: int) -> AbstractContextManager[None]:
        """Inside, another budget applies."""

    def ignore(self, tensor: torch.Tensor) -> None:
        """Do not count a storage of the engine's own, which its owner charges."""

    def count(self, tensor: torch.Tensor, kind: str = "temporaries") -> None:
        """Count a storage that the meter did not see being made."""

    def as_one(self, key: Hashable, given: torch.Tensor, run: Callable[[], torch.Tensor], kind: str, rest: str) -> torch.Tensor:
        """Run code as one operator, the same for each `key`: its result is of `kind`, what it takes besides of `rest`. It may
        empty the storage of `given`."""

    def counting(self, kind: str) -> AbstractContextManager[None]:
        """Inside, what operators make is of this kind, and storages may be emptied."""

    def mark(self, tensor: torch.Tensor, kind: str) -> None:
        """Change the kind of a counted storage."""

    def lend(self, tensor: torch.Tensor) -> None:
        """Count a tensor of the batch while the step runs."""

    def forget(self, tensor: torch.Tensor) -> None:
        """End of `lend`."""

    def expect(self, nbytes: int) -> None:
        """Make room for so many bytes that are about to be allocated."""

    def aside(self, run: Callable[[], None], nbytes: int) -> None:
        """Run engine code whose allocations are known."""

    def mark_saved(self, tensor: torch.Tensor) -> None:
        """Autograd saves the tensor, so it is an activation."""

    def replayed(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps a function that torch's checkpoint will run again, and accounts for what checkpoint itself saves."""

    def reset_peak(self) -> int:
        """The peak since the last reset."""

    def settle(self) -> None:
        """Enter in the ledger what happened since the last operator: storages that were emptied, or the peak since then."""

    def largest(self) -> tuple[int, tuple[int, ...]]:
        """Bytes and shape of the largest live tensor."""

    def close(self) -> None:
        """Lift the budget."""
