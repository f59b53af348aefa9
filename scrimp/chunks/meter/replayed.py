"""Accounts for the random state that `torch.utils.checkpoint` saves: from a layer's forward until its graph is freed, and once
more during the recomputation. No operator makes it, so no dispatch mode sees it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch


class Holder(Protocol):
    """Charges and frees bytes that no operator made."""

    def hold(self, nbytes: int) -> None: ...

    def release(self, nbytes: int) -> None: ...


class Replayed:
    """A function for one `checkpoint`, which holds it exactly as long as the random state."""

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
