"""How bytes cross between host and device: on CUDA one stream up and one down beside the stream that computes.

Memory of layers belongs to the computing stream. A copy up waits for what was computed before its memory was given out;
whoever computes with it waits for the copy. A copy down waits for what made its source; whoever frees the source makes the
computing stream wait for the copy. Nobody ever waits on the host, except to read what came down.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

Event = torch.cuda.Event | None


@dataclass(kw_only=True)
class Traffic:
    """Bytes moved between the tiers, by direction."""

    up_nbytes: int = 0  # host to device
    down_nbytes: int = 0  # device to host
    read_nbytes: int = 0  # disk to host
    written_nbytes: int = 0  # host to disk


class CopyStreams:
    """Without CUDA copies are done when they return, and all waiting is nothing."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.overlapped = device.type == "cuda"
        if self.overlapped:
            self.upward = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self.downward = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def up(self, target: torch.Tensor, source: torch.Tensor) -> Event:
        return self._copy(target, source, "upward")

    def down(self, target: torch.Tensor, source: torch.Tensor) -> Event:
        return self._copy(target, source, "downward")

    def wait(self, event: Event) -> None:
        """What is computed from here on comes after the copy."""
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)

    def settle(self) -> None:
        """The host may read what came down, and write what was sent up."""
        if self.overlapped:
            torch.cuda.current_stream(self.device).synchronize()
            self.upward.synchronize()
            self.downward.synchronize()

    def _copy(self, target: torch.Tensor, source: torch.Tensor, name: str) -> Event:
        if not self.overlapped:
            target.copy_(source)
            return None
        lane: torch.cuda.Stream = getattr(self, name)
        lane.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(lane):
            target.copy_(source, non_blocking=True)
            event: torch.cuda.Event = lane.record_event()
            return event
