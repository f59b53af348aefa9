"""torch's recurrent modules keep weak references to their weights, by a private name. Nothing but TorchScript reads them, and
an object with weak references cannot be emptied."""

from __future__ import annotations

from torch import nn

NAME = "_flat_weight_refs"


def forget_weak_references(module: nn.Module) -> None:
    if isinstance(module, nn.RNNBase):
        setattr(module, NAME, [None] * len(getattr(module, NAME, [])))
