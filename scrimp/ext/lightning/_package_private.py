"""Which of Lightning's two packages is here, and names of Lightning and torchmetrics that are not public.

`lightning.pytorch` and `pytorch_lightning` are the same code twice: a Trainer of one refuses a Strategy of the other.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from scrimp.errors import RunError

PACKAGES = ("lightning.pytorch", "pytorch_lightning")


def package() -> Any:
    """The package whose Trainer the program uses: the one that is imported already, else the one that is installed."""
    loaded = [name for name in PACKAGES if name in sys.modules]
    found = loaded or [name for name in PACKAGES if find_spec(name.partition(".")[0]) is not None]
    if not found:
        raise RunError("scrimp.ext.lightning needs Lightning 2.5 or newer, and it is not installed: pip install lightning")
    return import_module(found[0])


def changes_layers(strategy: Any) -> Any:
    """What Trainer(sync_batchnorm=True) sets."""
    return strategy._layer_sync


def only_gradients(loop: Any) -> None:
    """A loop of validation then turns off gradients only: a tensor made in inference mode may not be changed outside of it, and
    the engine's buffers and the state of metrics outlive the loop."""
    loop.inference_mode = False


class Metrics:
    """The state of a module's torchmetrics metrics, which a repeated step must not update twice."""

    OWN = ("_update_count", "_computed", "_forward_cache")

    def __init__(self, module: nn.Module) -> None:
        metric = getattr(sys.modules.get("torchmetrics"), "Metric", None)
        self._metrics = [] if metric is None else [each for each in module.modules() if isinstance(each, metric)]

    def state(self) -> list[dict[str, Any]]:
        copies: dict[int, Any] = {}  # metrics of one collection share tensors
        return [
            {name: _copy(getattr(metric, name, None), copies) for name in (*metric._defaults, *self.OWN)}
            for metric in self._metrics
        ]

    def restore(self, states: list[dict[str, Any]]) -> None:
        copies: dict[int, Any] = {}
        for metric, state in zip(self._metrics, states, strict=True):
            for name, value in state.items():
                object.__setattr__(metric, name, _copy(value, copies))


def _copy(value: Any, copies: dict[int, Any]) -> Any:
    if id(value) not in copies:
        made = value.detach().clone() if isinstance(value, torch.Tensor) else [*value] if isinstance(value, list) else value
        copies[id(value)] = (made, value)  # the value too: its id must not be given to another
    return copies[id(value)][0]
