"""Keeps a GPU busy for a while, so that the host can queue work ahead of it: then what is measured is the GPU's work alone, and
not the launches. Torch has `torch.cuda._sleep` for its own tests."""

from __future__ import annotations

import torch

CYCLES_PER_SECOND = 2e9  # of a fast GPU's clock; a slower one is busy for longer


def occupy(device: torch.device, seconds: float) -> None:
    """Returns at once. Does nothing on a device that is no GPU."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda._sleep(int(seconds * CYCLES_PER_SECOND))  # type: ignore[no-untyped-call]
