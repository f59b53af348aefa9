"""Finds weights that are used outside their own module's forward: `F.linear(x, self.child.weight)`, a ParameterList.

The engine fetches a layer's weights when its module's forward is called. A tracing step also inspects the arguments of every
torch function, and fetches the layers of weights that arrive there. If it finds any, all later steps inspect arguments too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from scrimp.chunks import PlainMode
from scrimp.engine.setup.empty_parameter import VIEWS
from scrimp.engine.step.residency import Residents


class OutOfModule(TorchFunctionMode):
    """Fetches such weights in the forward."""

    def __init__(self, residents: Residents) -> None:
        super().__init__()
        self.residents = residents
        self.found = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.residents.moving and not _looks(func):
            for argument in args:
                self._look(argument)
            for argument in (kwargs or {}).values():
                self._look(argument)
        return func(*args, **(kwargs or {}))

    def _look(self, argument: Any) -> None:
        if isinstance(argument, torch.Tensor):
            layer = self.residents.layer_of(argument)
            if layer is not None and not self.residents.ready(layer):
                self.found = True
                self.residents.touch(layer)
        elif isinstance(argument, (list, tuple)):
            for item in argument:
                self._look(item)


def _looks(func: Any) -> bool:
    """Reading a weight's shape or dtype does not use its values."""
    return getattr(func, "__name__", "") == "__get__" and getattr(func.__self__, "__name__", "") not in VIEWS


class OutOfModuleInBackward(PlainMode):
    """The same in backward, where a model that checkpoints a part of a layer runs that part again. It is a dispatch mode, because
    torch disables function modes during a backward."""

    def __init__(self, residents: Residents) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.residents = residents
        self.layers: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.residents.moving:
            for argument in args:
                self._look(argument)
        return func(*args, **(kwargs or {}))

    def _look(self, argument: Any) -> None:
        layer = self.residents.layer_of(argument) if isinstance(argument, torch.Tensor) else None
        if layer is None:
            return
        if not self.residents.ready(layer):
            self.layers.add(layer)
            self.residents.touch(layer)
        if layer in self.layers:  # checkpoint saves the weight itself here, not a handle
            self.residents.hold(layer)
