"""What torch calls when a gradient is there."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from scrimp.engine._engine import Engine


def landing(engine: weakref.ref[Engine]) -> Callable[[torch.Tensor], None]:
    """Torch keeps hooks where the garbage collector does not look: through one of its own an engine would live for ever."""

    def land(parameter: torch.Tensor) -> None:
        alive = engine()
        if alive is not None:
            alive.land(parameter)

    return land
