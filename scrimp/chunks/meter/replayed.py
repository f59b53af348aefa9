"""What `torch.utils.checkpoint` keeps for itself: the random state, from a layer's forward until its graph goes, and one
more while the layer runs again. They are no operator's outputs, so no dispatch mode sees them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch


class Holder(Protocol):
    """Charges, and frees, bytes that no operator made."""

    def hold(self, nbytes: int) -> None: ...

    def release(self, nbytes: int) -> None: ...


class Replayed:
    """A function for one `checkpoint`, which keeps it exactly as long as the random state."""

    def __init__(self, run: Callable[..., Any], holder: Holder) -> None:
        self._run = run
        self._holder = holder
        self._ran = False
        self._nbytes = torch.get_rng_state().nbytes
        holder.hold(self._nbytes)
        weakref.finalize(self, holder.release, self._nbytes)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._ran:
            self._ran = True
            return self._run(*args, **kwargs)
        self._holder.hold(self._nbytes)
        try:
            return self._run(*args, **kwargs)
        finally:
            self._holder.release(self._nbytes)
