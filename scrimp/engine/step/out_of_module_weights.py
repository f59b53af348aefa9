"""Weights that are used where their own module does not run: `F.linear(x, self.child.weight)`, a ParameterList.

A layer's weights come when its module's forward is called. A tracing step also looks at the arguments of every torch
function, and brings the layers of weights that came another way. If there are such, all steps look.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from scrimp.chunks import PlainMode
from scrimp.engine.setup.empty_parameter import VIEWS
from scrimp.engine.step.residency import Residents


class OutOfModule(TorchFunctionMode):
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
    """A look at a weight's shape or dtype is no use of it."""
    return getattr(func, "__name__", "") == "__get__" and getattr(func.__self__, "__name__", "") not in VIEWS


class OutOfModuleInBackward(PlainMode):
    """The same while backward runs, where a model that checkpoints a part of a layer runs that part again. A function mode
    would not do: torch lifts it for the whole of a backward."""

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
        if layer in self.layers:  # checkpoint keeps the weight itself for what follows, and no handle
            self.residents.hold(layer)
