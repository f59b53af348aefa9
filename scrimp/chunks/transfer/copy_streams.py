"""Copies between host and device; on CUDA on one stream up and one down, overlapped with the compute stream.

Memory of layers belongs to the compute stream. A copy up waits for work that was queued before its memory was allocated, and the
compute stream waits for the copy before using it. A copy down waits for the work that made its source, and the compute stream
waits for the copy before the source is freed. The host never waits, except to read what was copied down.
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
    """Without CUDA copies are synchronous, and waiting does nothing."""

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
        """Let the compute stream wait for the copy."""
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)

    def settle(self) -> None:
        """Wait until the host may read what was copied down, and overwrite what was copied up."""
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
