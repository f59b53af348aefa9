"""The device meter of a machine without a GPU: counts every CPU storage that an operator makes, until it is freed.

The autograd engine runs CPU backward in the calling thread, so the dispatch mode sees it too. Memory that a kernel allocates and
frees inside one operator is profiled the first time (`meter/op_profile.py`). From then on the meter checks the budget before the
operator runs. The owners of the engine's own storages (arenas, layer storages, staging) register and charge them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from scrimp.chunks.meter.dispatch_private import PlainMode, Unseen
from scrimp.chunks.meter.op_profile import Scale, Weight, signature_of
from scrimp.chunks.meter.replayed import Replayed
from scrimp.ledger import Ledger

WRAPPED_NBYTES = 8
MOVE = "move"  # between layouts, as a recorded step names it


class CpuMeter(PlainMode):
    """Charges the ledger. Calls `over(False)` when the total exceeds the budget, and `over(True)` when it would unless something
    is freed. `peak_nbytes`: peak of the bytes that this meter counts, since the last reset."""

    def __init__(self, ledger: Ledger, budget_nbytes: int, over: Callable[[bool], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ledger = ledger
        self.budget_nbytes = budget_nbytes
        self.live_nbytes = 0
        self.peak_nbytes = 0
        self._over = over
        self._scale = Scale()
        self._entered = 0
        self._most_live = 0  # since `_learned` began
        self._given: Any = None  # a storage that the running code may empty
        self._wrapped_nbytes = 0
        self._kind = "temporaries"  # of what operators make now
        self._moves = False  # storages may be emptied
        self._known: dict[int, tuple[str, int]] = {}
        self._lent: set[int] = set()
        self._shapes: dict[int, tuple[int, ...]] = {}  # of counted storages
        self._coming: tuple[int, tuple[int, ...]] = (0, ())  # output of the running operator
        self._alive: dict[int, weakref.ref[Any]] = {}  # counted storages, with a callback for when they are freed
        self._self = weakref.ref(self)  # so that the callbacks do not keep the engine alive

    def __enter__(self) -> Any:
        self._entered += 1
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *exc: Any) -> None:
        self._entered -= 1
        super().__exit__(*exc)
        wrapped, self._wrapped_nbytes = self._wrapped_nbytes, 0
        self.release(wrapped)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.is_view:  # allocates nothing, but its base may be a storage that no operator made
            out = func(*args, **kwargs)
            self._count_all(out)
        else:
            out = self._run(func, args, kwargs)
        if self.ledger.total_nbytes > self.budget_nbytes:
            self._over(False)
        return out

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator, and raise the peaks by its memory: before it runs, if its profile is known."""
        if self.ledger.recording is not None:
            self.ledger.recording.operator = str(func)
        signature = signature_of(func, args, kwargs)
        weight = self._scale.known(signature)
        if weight is None:
            self._prepare(self._scale.guess(func, args))
            out, weight = self._scale.weigh(signature, func, args, kwargs)
            self._coming = (weight.out_nbytes, weight.out_shape)
            self._flash({self._kind: weight.made_nbytes, "workspace": weight.need_nbytes - weight.made_nbytes})
        else:
            self._coming = (weight.out_nbytes, weight.out_shape)
            self.expect(weight.made_nbytes, self._kind, weight.need_nbytes - weight.made_nbytes)
            out = func(*args, **kwargs)
        self._coming = (0, ())
        before = self.live_nbytes
        self.peak_nbytes = max(self.peak_nbytes, before + weight.need_nbytes)
        self._count_all(out)
        if self.live_nbytes - before > weight.need_nbytes:
            self._scale.forget(signature)
        # Freed with the graph, but without notice. They are few, so they count until the end of the step.
        if weight.numbers and torch.is_grad_enabled():
            self._wrapped_nbytes += WRAPPED_NBYTES * weight.numbers
            self.hold(WRAPPED_NBYTES * weight.numbers)
        return out

    def expect(self, nbytes: int, kind: str = "parameters", workspace_nbytes: int = 0) -> None:
        """So much is about to be allocated: check the budget now, and raise the ledger's peak."""
        more = nbytes + workspace_nbytes
        total = self.ledger.total_nbytes + more
        # Otherwise neither the budget nor the ledger's peak is affected; a recorded step shows every operator's workspace.
        if more and (total > self.budget_nbytes or total > self.ledger.peak.nbytes or self.ledger.recording is not None):
            self._prepare(more)
            self._flash({kind: nbytes, "workspace": workspace_nbytes})

    def aside(self, run: Callable[[], None], nbytes: int) -> None:
        """Run the engine's own arithmetic, which takes `nbytes` while it runs and keeps nothing: many small operators, which are
        not metered one by one."""
        self.expect(nbytes, "temporaries")
        self.peak_nbytes = max(self.peak_nbytes, self.live_nbytes + nbytes)
        with Unseen():
            run()

    def as_one(self, key: Hashable, given: torch.Tensor, run: Callable[[], torch.Tensor], kind: str, rest: str) -> torch.Tensor:
        """Run code as one operator: it is metered operator by operator the first time, and not at all from then on. Its result is
        of `kind`, what it takes besides of `rest`. It may empty the storage of `given`."""
        if not self._entered:
            return run()
        if self.ledger.recording is not None:
            self.ledger.recording.operator = MOVE
        weight = self._scale.known(key)
        if weight is None:
            return self._learned(key, given, run, kind, rest)
        before, storage = self.live_nbytes, given.untyped_storage()
        own = min(weight.made_nbytes, weight.out_nbytes)
        self._prepare(weight.need_nbytes)
        self._flash({kind: own, rest: weight.made_nbytes - own, "workspace": weight.need_nbytes - weight.made_nbytes})
        self.peak_nbytes = max(self.peak_nbytes, before + weight.need_nbytes)
        with Unseen():
            out = run()
        if not storage.nbytes():
            self._freed(storage._cdata)
        self.count(out, kind)
        self.mark(out, kind)
        return out

    def _learned(self, key: Hashable, given: torch.Tensor, run: Callable[[], torch.Tensor], kind: str, rest: str) -> torch.Tensor:
        """The most that live storages, and all bytes, grow while it runs."""
        before, peak = self.live_nbytes, self.peak_nbytes
        self.peak_nbytes = self._most_live = before
        self._given = given.untyped_storage()
        try:
            with self.counting(rest):
                out = run()
        finally:
            need, live = self.peak_nbytes - before, self._most_live - before
            self.peak_nbytes, self._given = max(peak, self.peak_nbytes), None
        self.mark(out, kind)
        made = 0 if out.untyped_storage()._cdata == given.untyped_storage()._cdata else out.untyped_storage().nbytes()
        self._scale.learn(key, Weight(need, 0, live, made))
        return out

    def _flash(self, nbytes: dict[str, int]) -> None:
        """Charge and free at once, by kind, for memory that lives so briefly that only the peak matters."""
        self._look_again(sum(nbytes.values()) - nbytes.get("workspace", 0))
        for kind, size in nbytes.items():
            self.ledger.charge(kind, size)
        try:
            if self.ledger.total_nbytes > self.budget_nbytes:
                self._over(False)
        finally:
            for kind, size in nbytes.items():
                self.ledger.free(kind, size)

    def _look_again(self, nbytes: int) -> None:
        """Before so many bytes raise the peak: a storage that was donated to a move is empty by now, which no operator tells."""
        if self._given is not None and not self._given.nbytes():
            self._freed(self._given._cdata)
            self._given = None
        if not self._moves or self.ledger.total_nbytes + nbytes <= self.ledger.live_peak.nbytes:
            return
        for key, alive in [*self._alive.items()]:
            storage = alive()
            if storage is not None and not storage.nbytes():
                self._freed(key)

    def _prepare(self, nbytes: int) -> None:
        """Make room before anything is charged, so that evicted and new bytes never count together."""
        if self.ledger.total_nbytes + nbytes > self.budget_nbytes:
            self._over(True)

    def ignore(self, tensor: torch.Tensor) -> None:
        """Do not count a storage of the engine's own; its owner charges it."""
        storage = tensor.untyped_storage()
        self._known[storage._cdata] = ("", 0)
        weakref.finalize(storage, self._known.pop, storage._cdata, None)

    def _count_all(self, out: Any) -> None:
        for leaf in (out,) if isinstance(out, torch.Tensor) else tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self.count(leaf)

    def count(self, tensor: torch.Tensor, kind: str | None = None) -> None:
        kind = kind or self._kind
        if not tensor.is_cpu or tensor.layout is not torch.strided:  # a sparse tensor has no storage
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known or not (nbytes := storage.nbytes()):
            return
        self._look_again(nbytes)
        self._known[key] = (kind, nbytes)
        self._shapes[key] = tuple(tensor.shape)
        self.live_nbytes += nbytes
        self._most_live = max(self._most_live, self.live_nbytes)
        self.peak_nbytes = max(self.peak_nbytes, self.live_nbytes)
        self.ledger.charge(kind, nbytes)
        self._alive[key] = weakref.ref(storage, partial(_freed, self._self, key))

    def begin(self) -> None: ...

    @contextmanager
    def allowing(self, nbytes: int) -> Iterator[None]:
        """Inside, another budget applies."""
        before, self.budget_nbytes = self.budget_nbytes, nbytes
        try:
            yield
        finally:
            self.budget_nbytes = before

    def lend(self, tensor: torch.Tensor) -> None:
        """Count a tensor of the batch for the duration of a step: only its own bytes, though its storage may be larger. A storage
        that is counted already, such as the result of an evaluation, is not counted twice."""
        if not tensor.is_cpu:
            return
        key = tensor.untyped_storage()._cdata
        if key in self._known and key not in self._lent:
            return
        self._lent.add(key)
        before = self._known.get(key, ("", 0))[1]
        self._known[key] = ("buffers", before + tensor.nbytes)
        self.live_nbytes += tensor.nbytes
        self.peak_nbytes = max(self.peak_nbytes, self.live_nbytes)
        self.ledger.charge("buffers", tensor.nbytes)

    @contextmanager
    def counting(self, kind: str) -> Iterator[None]:
        """Inside, storages that operators make are of this kind."""
        before, self._kind, self._moves = self._kind, kind, True
        try:
            yield
        finally:
            self._kind = before

    def mark_saved(self, tensor: torch.Tensor) -> None:
        """Autograd saves it, so it is an activation and no longer a temporary."""
        if self._known.get(tensor.untyped_storage()._cdata, ("", 0))[0] == "temporaries":
            self.mark(tensor, "activations")

    def mark(self, tensor: torch.Tensor, kind: str) -> None:
        """Change the kind of a counted storage; the engine's own stay as they are."""
        key = tensor.untyped_storage()._cdata
        before, nbytes = self._known.get(key, ("", 0))
        if nbytes and key not in self._lent:
            self._known[key] = (kind, nbytes)
            self.ledger.move(nbytes, source=before, target=kind)

    def hold(self, nbytes: int) -> None:
        """Count bytes that are about to be allocated outside of operators."""
        self._prepare(nbytes)
        self.live_nbytes += nbytes
        self.peak_nbytes = max(self.peak_nbytes, self.live_nbytes)
        self.ledger.charge("activations", nbytes)
        if self.ledger.total_nbytes > self.budget_nbytes:
            self._over(False)

    def release(self, nbytes: int) -> None:
        self.live_nbytes -= nbytes
        self.ledger.free("activations", nbytes)

    def replayed(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """For `checkpoint`: the function, which charges what checkpoint saves for the recomputation."""
        return Replayed(run, self)

    def reset_peak(self) -> int:
        """The peak so far; the next one starts from the live bytes."""
        peak, self.peak_nbytes = self.peak_nbytes, self.live_nbytes
        return peak

    def forget(self, tensor: torch.Tensor) -> None:
        """End of `lend`: the tensor lives on, but is no longer charged."""
        key = tensor.untyped_storage()._cdata
        if key in self._lent:
            self._lent.remove(key)
            self._freed(key)

    def largest(self) -> tuple[int, tuple[int, ...]]:
        """Bytes and shape of the largest tensor that is live, or that the running operator makes."""
        live = max(self._shapes, key=lambda key: self._known[key][1], default=None)
        known = (0, ()) if live is None else (self._known[live][1], self._shapes[live])
        return max(known, self._coming)

    def close(self) -> None: ...

    def _freed(self, key: int) -> None:
        kind, nbytes = self._known.pop(key, ("", 0))
        self._shapes.pop(key, None)
        self._alive.pop(key, None)
        if nbytes:
            self.live_nbytes -= nbytes
            self.ledger.free(kind, nbytes)


def _freed(meter: weakref.ref[CpuMeter], key: int, _: weakref.ref[Any]) -> None:
    alive = meter()
    if alive is not None:
        alive._freed(key)
