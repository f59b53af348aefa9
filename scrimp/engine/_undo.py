"""What a forward changes besides gradients, so that a step that did not fit can be tried again as if it had not been:
buffers (running statistics) and the random state."""

from __future__ import annotations

import torch
from torch import nn

from scrimp.chunks._arena import arena


class Undo:
    """Kept on the host. Buffers that no tracing step has ever seen change are not copied again."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._buffers = [buffer for buffer in model.buffers() if buffer is not None]
        self._device = device
        self._copies: list[torch.Tensor] = []
        self._watched: list[torch.Tensor] = self._buffers

    def begin(self, *, tracing: bool) -> None:
        if tracing:
            self._watched = self._buffers
        self._copies = [arena(b.numel(), b.dtype).view(b.shape).copy_(b.detach()) for b in self._watched]
        self._random = bytearray(torch.get_rng_state().numpy())
        if self._device.type == "cuda":
            self._cuda_random = torch.cuda.get_rng_state(self._device)

    def back(self) -> None:
        with torch.no_grad():
            for buffer, copy in zip(self._watched, self._copies, strict=True):
                buffer.copy_(copy)
        torch.set_rng_state(torch.frombuffer(self._random, dtype=torch.uint8))
        if self._device.type == "cuda":
            torch.cuda.set_rng_state(self._cuda_random, self._device)

    def done(self, *, tracing: bool) -> None:
        if tracing:
            pairs = zip(self._watched, self._copies, strict=True)
            self._watched = [buffer for buffer, copy in pairs if not torch.equal(buffer.cpu(), copy)]
        self._copies = []
