"""Saves and restores what a forward changes besides gradients, so that a step can be retried: buffers (running statistics) and
the random state."""

from __future__ import annotations

import torch
from torch import nn

from scrimp.engine.step.abandon import Leftovers
from scrimp.engine.step.buffers import Copy, Place, copies, places


class Rollback:
    """The engine holds the copies from `begin` to `done`. The copy of a large buffer that never changed is kept longer, so that
    it is not made again."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._all = places(model)
        self._device = device
        self._copies: list[Copy] = []
        self._lasting: dict[Place, Copy] = {}
        self._changing: set[Place] = set()
        self._leftovers = Leftovers()

    def begin(self, *, tracing: bool) -> None:
        self._leftovers.begin()
        self._lasting = {place: copy for place, copy in self._lasting.items() if copy.mark.holds and not tracing}
        fresh = copies([place for place in self._all if place not in self._lasting], on_host=True)
        self._copies = [*fresh, *self._lasting.values()]
        self._random = bytearray(torch.get_rng_state().numpy())
        if self._device.type == "cuda":
            self._cuda_random = torch.cuda.get_rng_state(self._device)

    def clear(self) -> None:
        """Free the graph of a backward that failed."""
        self._leftovers.clear()

    def back(self) -> None:
        for copy in self._copies:
            if not (copy.place in self._lasting and copy.mark.holds):
                copy.back()
        torch.set_rng_state(torch.frombuffer(self._random, dtype=torch.uint8))
        if self._device.type == "cuda":
            torch.cuda.set_rng_state(self._cuda_random, self._device)

    def done(self, *, tracing: bool) -> None:
        large = [copy for copy in self._copies if copy.place.large and copy.place not in self._changing]
        self._changing |= {copy.place for copy in large if (copy.changed if tracing else not copy.mark.holds)}
        self._lasting = {copy.place: copy for copy in large if copy.place not in self._changing}
        self._copies = []
