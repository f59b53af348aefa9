"""Weights that are used where their own module does not run: `F.linear(x, self.child.weight)`, a ParameterList.

A layer's weights come when its module's forward is called. A tracing step also looks at the arguments of every torch
function, and brings the layers of weights that came another way. If there are such, all steps look. In backward they come
another way where the model itself checkpoints a part of a layer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from scrimp.engine._resident import Residents


class Strays(TorchFunctionMode):
    def __init__(self, residents: Residents) -> None:
        super().__init__()
        self.residents = residents
        self.found = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # A look at a weight's shape or dtype is no use of it.
        if not self.residents.moving and getattr(func, "__name__", "") != "__get__":
            for argument in args:
                self._look(argument)
            for argument in (kwargs or {}).values():
                self._look(argument)
        return func(*args, **(kwargs or {}))

    def _look(self, argument: Any) -> None:
        if isinstance(argument, torch.Tensor):
            layer = self.residents.layer_of(argument)
            if layer is None:
                return
            if not self.residents.ready(layer):
                self.found = True
                self.residents.touch(layer)
            if self.found and torch._C._current_graph_task_id() != -1:  # the model's own checkpointing of a part of a layer
                self.residents.hold(layer)
        elif isinstance(argument, (list, tuple)):
            for item in argument:
                self._look(item)
