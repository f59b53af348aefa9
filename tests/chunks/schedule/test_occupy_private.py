"""Torch's private function that keeps a GPU busy is there; `tests/rehearsal/test_clock.py` runs it on a GPU."""

from __future__ import annotations

import inspect

import torch

from scrimp.chunks import occupy


def test_torch_has_it_and_other_devices_do_nothing() -> None:
    assert [*inspect.signature(torch.cuda._sleep).parameters] == ["cycles"]
    occupy(torch.device("cpu"), 1e9)
