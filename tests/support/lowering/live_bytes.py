"""Bytes of all live CPU storages that operators of this thread made: nothing of the engine's meter is used here."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """`where` is asked for a text whenever the peak rises. Views that share a storage count once."""

    def __init__(self, where: Callable[[], str] = str) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.at, self._where = "", where
        self._known: dict[int, int] = {}
        self._alive: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for each in tree_leaves(made):
            if isinstance(each, torch.Tensor):
                self.count(each)
        return made

    def count(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        self._known[key] = storage.nbytes()
        self.live += self._known[key]
        self._alive[key] = weakref.ref(storage, lambda _: self._freed(key))
        if self.live > self.peak:
            self._look_again()
        if self.live > self.peak:
            self.peak, self.at = self.live, self._where()

    def _look_again(self) -> None:
        """A donated storage is emptied, not freed, which no operator tells."""
        for key, ref in self._alive.items():
            storage = ref()
            if self._known[key] and storage is not None and not storage.nbytes():
                self.live -= self._known[key]
                self._known[key] = 0

    def ignore(self, tensor: torch.Tensor) -> None:
        """From now on its bytes do not count."""
        key = tensor.untyped_storage()._cdata
        self.live -= self._known.get(key, 0)
        self._known[key] = 0

    def _freed(self, key: int) -> None:
        self.live -= self._known.pop(key, 0)
        self._alive.pop(key, None)
