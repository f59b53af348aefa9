"""Copies of a model's buffers: to restore them after a failed step, and to give a recomputation the values of the first forward.

A forward may write into a buffer (running statistics, spectral_norm) or replace it. Version counters do not show every write:
batch norm's kernel and `buffer.data` bypass them. So every small buffer is always copied. A large one (a mask, a table) is copied
again only if it has changed once: detected by value in a tracing step, by identity or version in any other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from scrimp.chunks import arena
from scrimp.engine.step.abandon import StepAgain
from scrimp.errors import RunError

LARGE_NBYTES = 256 << 10


@dataclass(frozen=True, kw_only=True)
class Place:
    """A module's name for a buffer. One tensor may have several places."""

    module: nn.Module
    name: str

    @property
    def buffer(self) -> torch.Tensor | None:
        return self.module._buffers.get(self.name)

    @property
    def large(self) -> bool:
        return self.buffer is not None and self.buffer.nbytes > LARGE_NBYTES


@dataclass(frozen=True, kw_only=True)
class Mark:
    """The tensor of a place and its version: a cheap check of whether it was written or replaced since."""

    place: Place
    buffer: torch.Tensor | None
    version: int

    @classmethod
    def of(cls, place: Place) -> Mark:
        buffer = place.buffer
        return cls(place=place, buffer=buffer, version=0 if buffer is None else buffer._version)

    @property
    def holds(self) -> bool:
        now = self.place.buffer
        return now is self.buffer and (now is None or now._version == self.version)


@dataclass(frozen=True, kw_only=True)
class Copy:
    mark: Mark
    values: torch.Tensor

    @property
    def place(self) -> Place:
        return self.mark.place

    def back(self) -> None:
        buffer = self.mark.buffer
        assert buffer is not None
        with torch.no_grad():
            buffer.copy_(self.values)
        self.place.module._buffers[self.place.name] = buffer

    @property
    def changed(self) -> bool:
        now = self.place.buffer
        return now is not self.mark.buffer or now is None or not torch.equal(now.to(self.values.device), self.values)


def places(model: nn.Module) -> list[Place]:
    return [
        Place(module=module, name=name)
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]


def copies(of: Iterable[Place], *, on_host: bool = False) -> list[Copy]:
    """Copies each tensor once, however many places it has. `on_host`: into the engine's own memory, which no meter counts. A
    small buffer of a GPU is copied on the GPU, because a copy to the host would wait for the device."""
    made: list[Copy] = []
    values: dict[int, torch.Tensor] = {}
    for place in of:
        buffer = place.buffer
        if buffer is None:
            continue
        if id(buffer) not in values:
            b = buffer.detach()
            host = on_host and (b.is_cpu or place.large)
            values[id(buffer)] = arena(b.numel(), b.dtype).view(b.shape).copy_(b) if host else b.clone()
        made.append(Copy(mark=Mark.of(place), values=values[id(buffer)]))
    return made


@contextmanager
def instead(of: Iterable[Copy]) -> Iterator[None]:
    """Puts the copies into the model. The buffers themselves are not touched, because autograd may have saved them."""
    now = [Mark.of(copy.place) for copy in of]
    for copy in of:
        copy.place.module._buffers[copy.place.name] = copy.values
    try:
        yield
    finally:
        for mark in now:
            mark.place.module._buffers[mark.place.name] = mark.buffer
    for mark in now:
        if not mark.holds:
            raise RunError(
                f"a recomputation wrote into the buffer '{mark.place.name}' of a {type(mark.place.module).__name__} by another "
                "name than the registered one; write through the module's own attribute, or use activations='keep'"
            )


class Watch:
    """Copies and compares the buffers of one layer around its first forward."""

    def __init__(self, module: nn.Module) -> None:
        self._all = places(module)
        self._changing: set[Place] = set()  # large buffers that have changed once

    def before(self, *, tracing: bool) -> tuple[list[Copy], list[Mark]]:
        """Copies of buffers that may change, and marks of those assumed constant."""
        if not self._all:
            return [], []
        constant = [place for place in self._all if place.large and place not in self._changing]
        if tracing:
            return copies(self._all), []
        left = [place for place in self._all if place not in constant] if constant else self._all
        return copies(left), [Mark.of(place) for place in constant]

    def after(self, made: list[Copy], marks: list[Mark]) -> list[Copy]:
        """The copies that the recomputation needs. Raises `StepAgain` if a buffer without a copy changed."""
        moved = {mark.place for mark in marks if not mark.holds}
        if moved:
            self._changing |= moved
            raise StepAgain(f"buffers {sorted(place.name for place in moved)} changed for the first time")
        needed = []
        for copy in made:
            if copy.place.large and copy.place not in self._changing:
                if not copy.changed:
                    continue
                self._changing.add(copy.place)
            needed.append(copy)
        return needed
