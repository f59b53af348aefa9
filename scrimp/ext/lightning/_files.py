"""Checkpoints: a full one is a folder of the engine, with Lightning's own state as JSON in its manifest.

One with the weights only (`save_weights_only=True`) is Lightning's own file, which `load_from_checkpoint` of any LightningModule
reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any

import torch

from scrimp._warnings import warn
from scrimp.engine import Engine
from scrimp.errors import CheckpointError
from scrimp.ext.lightning._json import as_json, from_json

LIGHTNING = "lightning"  # the key in the manifest's extra
HYPER = ("hyper_parameters", "datamodule_hyper_parameters")  # of which only load_from_checkpoint makes use
FULL = "optimizer_states"  # what Lightning's dict has if not only the weights are wanted


class Weights(MutableMapping[str, torch.Tensor]):
    """What Lightning and the user's hooks see as `checkpoint["state_dict"]`: all weights in fp32, read when first used, because a
    full checkpoint needs no second copy of them."""

    def __init__(self, read: Callable[[], dict[str, torch.Tensor]]) -> None:
        self._read, self._values, self.changed = read, dict[str, torch.Tensor](), False
        self._there = False

    def values_now(self) -> dict[str, torch.Tensor]:
        if not self._there:
            self._values, self._there = self._read(), True
        return self._values

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.values_now()[name]

    def __setitem__(self, name: str, value: torch.Tensor) -> None:
        self.values_now()[name] = value
        self.changed = True

    def __delitem__(self, name: str) -> None:
        del self.values_now()[name]
        self.changed = True

    def __iter__(self) -> Iterator[str]:
        return iter(self.values_now())

    def __len__(self) -> int:
        return len(self.values_now())


def save_full(engine: Engine, checkpoint: Mapping[str, Any], path: str | Path) -> None:
    """`checkpoint`: what Lightning and its hooks want to save."""
    if "://" in str(path):
        raise CheckpointError(f"{path} is not on a local disk: the engine writes checkpoints to local folders; copy it then")
    weights = checkpoint.get("state_dict")
    if not isinstance(weights, Weights) or weights.changed:
        raise CheckpointError(
            f"{path}: on_save_checkpoint changed checkpoint['state_dict'], which has no effect on a full checkpoint: the engine "
            "writes its own weights; change it only in checkpoints of ModelCheckpoint(save_weights_only=True)"
        )
    state = {}
    for name, value in checkpoint.items():
        if name in HYPER:
            state[name] = _those_json_can_hold(value, name)
        elif name != "state_dict":
            state[name] = as_json(value, f"checkpoint[{name!r}]")
    engine.save(path, extra={LIGHTNING: state})


def _those_json_can_hold(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    found = {}
    for name, value in values.items():
        try:
            found[name] = as_json(value, f"{where}[{name!r}]")
        except CheckpointError as error:
            warn(f"{error}; it is left out. self.save_hyperparameters(ignore=[{name!r}]) does so without a warning")
    return found


def lightning_state(extra: Mapping[str, Any], path: str | Path) -> dict[str, Any]:
    """Lightning's dict again, without the weights. `extra`: that of the checkpoint's manifest."""
    if LIGHTNING not in extra:
        raise CheckpointError(f"{path} has no state of a Lightning Trainer: load it with scrimp.Engine, which wrote it")
    state: dict[str, Any] = from_json(extra[LIGHTNING])
    return {**state, "state_dict": Weights(lambda: _not_here(path))}


def _not_here(path: str | Path) -> dict[str, torch.Tensor]:
    raise CheckpointError(f"checkpoint['state_dict'] of {path}: its weights are read by the engine, and not put into one dict")
