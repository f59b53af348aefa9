"""A module's buffers at one moment, to find what has changed since and to bring it back. A model may write into a buffer
(running statistics) or put another tensor in its place."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from scrimp.chunks._arena import arena


@dataclass(frozen=True, kw_only=True)
class Place:
    module: nn.Module
    name: str

    @property
    def buffer(self) -> torch.Tensor | None:
        return self.module._buffers.get(self.name)


@dataclass(frozen=True, kw_only=True)
class Copy:
    place: Place
    buffer: torch.Tensor
    values: torch.Tensor

    def back(self) -> None:
        with torch.no_grad():
            self.buffer.copy_(self.values)
        self.place.module._buffers[self.place.name] = self.buffer

    @property
    def changed(self) -> bool:
        # Not by versions: batch norm writes its statistics past them.
        return self.place.buffer is not self.buffer or not torch.equal(self.buffer.to(self.values.device), self.values)


def places(model: nn.Module) -> list[Place]:
    found: dict[int, Place] = {}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                found.setdefault(id(buffer), Place(module=module, name=name))
    return [*found.values()]


def copies(of: Iterable[Place], *, on_host: bool = False) -> list[Copy]:
    made = []
    for place in of:
        buffer = place.buffer
        if buffer is not None:
            b = buffer.detach()
            values = arena(b.numel(), b.dtype).view(b.shape).copy_(b) if on_host else b.clone()
            made.append(Copy(place=place, buffer=buffer, values=values))
    return made
