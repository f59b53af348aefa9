"""The device meter of a machine without a GPU: every CPU storage that an operator makes, from then until it dies.

The autograd engine runs CPU backward in the calling thread, so the mode sees it too. What operators use and free inside
one kernel is not seen. Storages of the engine's own (arenas, layer storages, staging) are known beforehand and charged
by their owners.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from scrimp.ledger import Ledger


class CpuMeter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Charges the ledger; calls `over` when the total passes the budget. `peak_nbytes` is the most that was live of
    what this meter counts since it was last reset."""

    def __init__(self, ledger: Ledger, budget_nbytes: int, over: Callable[[], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ledger = ledger
        self.budget_nbytes = budget_nbytes
        self.live_nbytes = 0
        self.peak_nbytes = 0
        self._over = over
        self._known: dict[int, tuple[str, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self.count(leaf)
        if self.ledger.total_nbytes > self.budget_nbytes:
            self._over()
        return out

    def ignore(self, tensor: torch.Tensor) -> None:
        """A storage of the engine's own: its owner charges it."""
        storage = tensor.untyped_storage()
        self._known[storage._cdata] = ("", 0)
        weakref.finalize(storage, self._known.pop, storage._cdata, None)

    def count(self, tensor: torch.Tensor, kind: str = "temporaries") -> None:
        if tensor.device.type != "cpu":
            return
        storage = tensor.untyped_storage()
        key, nbytes = storage._cdata, storage.nbytes()
        if key in self._known or not nbytes:
            return
        self._known[key] = (kind, nbytes)
        self.live_nbytes += nbytes
        self.peak_nbytes = max(self.peak_nbytes, self.live_nbytes)
        self.ledger.charge(kind, nbytes)
        weakref.finalize(storage, self._freed, key)

    def mark_saved(self, tensor: torch.Tensor) -> None:
        """Autograd keeps it: an activation, no longer a temporary."""
        key = tensor.untyped_storage()._cdata
        kind, nbytes = self._known.get(key, ("", 0))
        if kind == "temporaries":
            self._known[key] = ("activations", nbytes)
            self.ledger.move(nbytes, source="temporaries", target="activations")

    def reset_peak(self) -> int:
        """The peak so far; the next one starts from what lives now."""
        peak, self.peak_nbytes = self.peak_nbytes, self.live_nbytes
        return peak

    def forget(self, tensor: torch.Tensor) -> None:
        """It lives on, but not on the device: a batch after its step."""
        self._freed(tensor.untyped_storage()._cdata)

    def close(self) -> None: ...

    def _freed(self, key: int) -> None:
        kind, nbytes = self._known.pop(key, ("", 0))
        if nbytes:
            self.live_nbytes -= nbytes
            self.ledger.free(kind, nbytes)
