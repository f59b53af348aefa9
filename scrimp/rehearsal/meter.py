"""Counts the storages that operators make on one kind of device, until they are freed: on meta, the CPU or a GPU.

Each new storage is charged to the ledger and followed by a weak reference. A move counts as one operator: the most that it takes
while it runs is charged and freed at once, its result stays. On meta a move that comes again is not run again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from scrimp.chunks import PlainMode
from scrimp.ledger import Ledger


@dataclass
class Made:
    """A storage. `born`, `died`: events, by number; `point`: of the timeline, in which it was made."""

    nbytes: int
    kind: str
    shape: tuple[int, ...]
    dtype: str
    born: int
    point: int
    died: int | None = None


@dataclass(frozen=True)
class _Moved:
    """What a move takes: the most while it runs, and its result; `empties`: it frees its input."""

    most_nbytes: int
    shape: tuple[int, ...]
    empties: bool


class StorageMeter(PlainMode):
    """Implements `Meter`, without a budget. `devices`: kinds of devices whose storages count. `point`: the number of
    the point that runs. `history`: every storage so far."""

    live_nbytes = 0
    budget_nbytes = 1 << 62

    def __init__(self, ledger: Ledger, *devices: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ledger, self.point = ledger, 0
        self.history: list[Made] = []
        self.largest_nbytes, self.largest_event = 0, 0
        self._devices, self._event, self._entered = frozenset(devices), 0, 0
        self._own: set[int] = set()
        self._lent: dict[int, int] = {}
        self._alive: dict[int, tuple[Made, weakref.ref[Any]]] = {}
        self._inside: dict[int, tuple[int, weakref.ref[Any]]] | None = None  # storages that the running move has made
        self._given: Any = None  # the storage of its input
        self._late: list[Made] = []  # freed by it
        self._kind = "temporaries"
        self._now = self._most = 0  # bytes that the running move has more than before it
        self._moves: dict[Hashable, _Moved] = {}
        self._self = weakref.ref(self)

    def __enter__(self) -> Any:
        self._entered += 1
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        self._entered -= 1
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in (out,) if isinstance(out, torch.Tensor) else tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self.count(leaf)
        return out

    # Storages.

    def count(self, tensor: torch.Tensor, kind: str | None = None) -> None:
        if tensor.device.type not in self._devices:
            return
        storage = tensor.untyped_storage()
        key, nbytes = storage._cdata, storage.nbytes()
        if not nbytes or key in self._own or key in self._alive or key in self._lent:
            return
        if self._inside is not None:
            if key not in self._inside:
                self._inside[key] = nbytes, weakref.ref(storage, _Left(self._self, key))
                self._grow(nbytes)
            return
        self._charge(storage, key, nbytes, kind or self._kind, tensor)

    def _charge(self, storage: Any, key: int, nbytes: int, kind: str, tensor: torch.Tensor) -> None:
        self.settle_if(nbytes)
        self._event += 1
        made = Made(nbytes, kind, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), self._event, self.point)
        self.history.append(made)
        self._alive[key] = made, weakref.ref(storage, _Left(self._self, key))
        self.ledger.charge(kind, nbytes)
        self._saw_total()

    def _saw_total(self) -> None:
        if self.ledger.total_nbytes > self.largest_nbytes:
            self.largest_nbytes, self.largest_event = self.ledger.total_nbytes, self._event

    def left(self, key: int) -> None:
        """A storage is freed, or empty. While a move runs the ledger hears of it after the move."""
        if self._inside is not None and key in self._inside:
            self._now -= self._inside.pop(key)[0]
            return
        found = self._alive.pop(key, None)
        if found is None:
            return
        self._event += 1
        found[0].died = self._event
        if self._inside is None:
            self.ledger.free(found[0].kind, found[0].nbytes)
        else:
            self._now -= found[0].nbytes
            self._late.append(found[0])

    def settle(self) -> None:
        """Storages that a move has emptied are freed, though somebody still holds them."""
        for key, (_, alive) in [*self._alive.items()]:
            storage = alive()
            if storage is not None and not storage.nbytes():
                self.left(key)

    def settle_if(self, nbytes: int) -> None:
        if self.ledger.total_nbytes + nbytes > self.ledger.live_peak.nbytes:
            self.settle()

    # Moves.

    def as_one(self, key: Hashable, given: torch.Tensor, run: Callable[[], torch.Tensor], kind: str, rest: str) -> torch.Tensor:
        if not self._entered:
            return run()
        known = self._moves.get(key) if given.is_meta else None
        if known is None:
            return self._run_move(key, given, run, kind, rest)
        self.settle_if(known.most_nbytes)
        self._flash(known.most_nbytes, given.element_size() * prod(known.shape), kind, rest)
        if known.empties:
            given.untyped_storage().resize_(0)
            self.left(given.untyped_storage()._cdata)
        with self.counting(kind):
            return given.new_empty(known.shape)

    def _run_move(
        self, key: Hashable, given: torch.Tensor, run: Callable[[], torch.Tensor], kind: str, rest: str
    ) -> torch.Tensor:
        self.settle()
        storage = given.untyped_storage()
        inside: dict[int, tuple[int, weakref.ref[Any]]] = {}
        self._inside, self._now, self._most, self._given = inside, 0, 0, storage
        try:
            out = run()
        finally:
            self._inside = self._given = None
        if (known := self._moves.get(key)) is not None:  # the first time the ranks compared their programs; ledgers remember that
            self._most = max(self._most, known.most_nbytes)
        made, empties = out.untyped_storage(), not storage.nbytes()
        self._flash(self._most, 0 if made._cdata == storage._cdata else made.nbytes(), kind, rest)
        while self._late:
            late = self._late.pop()
            self.ledger.free(late.kind, late.nbytes)
        if empties:
            self.left(storage._cdata)
        if made._cdata in inside:
            self._charge(made, made._cdata, made.nbytes(), kind, out)
            if out.is_contiguous() and out.nbytes == made.nbytes():
                self._moves[key] = _Moved(self._most, tuple(out.shape), empties)
        else:
            self.mark(out, kind)
        return out

    def _grow(self, nbytes: int) -> None:
        """Before the running move makes a storage: what it has emptied is free."""
        assert self._inside is not None
        if not self._given.nbytes():
            self.left(self._given._cdata)
        for key, (_, alive) in [*self._inside.items()]:
            storage = alive()
            if storage is not None and not storage.nbytes():
                self.left(key)
        self._now += nbytes
        self._most = max(self._most, self._now)

    def _flash(self, most: int, out_nbytes: int, kind: str, rest: str) -> None:
        """So much more is live for a while."""
        own = min(most, out_nbytes)
        self._event += 1
        for each, nbytes in ((kind, own), (rest, most - own)):
            self.ledger.charge(each, nbytes)
        self._saw_total()
        for each, nbytes in ((kind, own), (rest, most - own)):
            self.ledger.free(each, nbytes)

    # The rest of `Meter`.

    @contextmanager
    def counting(self, kind: str) -> Iterator[None]:
        before, self._kind = self._kind, kind
        try:
            yield
        finally:
            self._kind = before

    def mark(self, tensor: torch.Tensor, kind: str) -> None:
        found = self._alive.get(tensor.untyped_storage()._cdata)
        if found is not None:
            self.ledger.move(found[0].nbytes, source=found[0].kind, target=kind)
            found[0].kind = kind

    def ignore(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self._own.add(storage._cdata)
        weakref.finalize(storage, self._own.discard, storage._cdata)

    def lend(self, tensor: torch.Tensor) -> None:
        key = tensor.untyped_storage()._cdata
        if tensor.device.type not in self._devices or ((key in self._own or key in self._alive) and key not in self._lent):
            return
        self._lent[key] = self._lent.get(key, 0) + tensor.nbytes
        self.ledger.charge("buffers", tensor.nbytes)
        self._saw_total()

    def forget(self, tensor: torch.Tensor) -> None:
        self.ledger.free("buffers", self._lent.pop(tensor.untyped_storage()._cdata, 0))

    def mark_saved(self, tensor: torch.Tensor) -> None:
        self.mark(tensor, "activations")

    def begin(self) -> None: ...

    def expect(self, nbytes: int) -> None: ...

    def aside(self, run: Callable[[], None], nbytes: int) -> None:
        run()

    def allowing(self, nbytes: int) -> AbstractContextManager[None]:
        return nullcontext()

    def replayed(self, run: Callable[..., Any]) -> Callable[..., Any]:
        return run

    def reset_peak(self) -> int:
        return 0  # schedules are not made from a rehearsal

    def largest(self) -> tuple[int, tuple[int, ...]]:
        return max(((made.nbytes, made.shape) for made, _ in self._alive.values()), default=(0, ()))

    def close(self) -> None: ...

    def alive_at_largest(self) -> list[Made]:
        """The storages that were alive when most was, the largest first."""
        at = self.largest_event
        found = [made for made in self.history if made.born <= at and (made.died is None or made.died > at)]
        return sorted(found, key=lambda made: -made.nbytes)


class _Left:
    """The callback of a weak reference, which keeps neither the storage nor the meter."""

    def __init__(self, meter: weakref.ref[StorageMeter], key: int) -> None:
        self._meter, self._key = meter, key

    def __call__(self, _: weakref.ref[Any]) -> None:
        meter = self._meter()
        if meter is not None:
            meter.left(self._key)
