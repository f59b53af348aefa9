"""What a forward changes besides gradients, so that a step that did not fit can be tried again as if it had not been:
buffers (running statistics) and the random state."""

from __future__ import annotations

import torch
from torch import nn

from scrimp.engine._buffers import Copy, copies, places
from scrimp.engine._leftovers import Leftovers


class Undo:
    """Kept on the host. Buffers that no tracing step has ever seen change are not copied again."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._all = places(model)
        self._watched = self._all
        self._device = device
        self._copies: list[Copy] = []
        self._leftovers = Leftovers()

    def begin(self, *, tracing: bool) -> None:
        self._leftovers.begin()
        if tracing:
            self._watched = self._all
        self._copies = copies(self._watched, on_host=True)
        self._random = bytearray(torch.get_rng_state().numpy())
        if self._device.type == "cuda":
            self._cuda_random = torch.cuda.get_rng_state(self._device)

    def clear(self) -> None:
        """Let go of what a backward that failed has left."""
        self._leftovers.clear()

    def back(self) -> None:
        for copy in self._copies:
            copy.back()
        torch.set_rng_state(torch.frombuffer(self._random, dtype=torch.uint8))
        if self._device.type == "cuda":
            torch.cuda.set_rng_state(self._cuda_random, self._device)

    def done(self, *, tracing: bool) -> None:
        if tracing:
            self._watched = [copy.place for copy in self._copies if copy.changed]
        self._copies = []
