"""What an engine is after some steps, written and read: parameters by name, and checkpoints."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from scrimp.checkpoint import load, save
from scrimp.chunks._table import Slot
from scrimp.engine._match import persistent_buffers
from scrimp.errors import CheckpointError, RunError

if TYPE_CHECKING:
    from scrimp.engine._engine import Engine


def persistent(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: buffer for name, _, _, buffer in persistent_buffers(model)}


def iter_state(engine: Engine) -> Iterator[tuple[str, torch.Tensor]]:
    engine.check_usable(reading=True)
    for name, parameter in engine.weights.items():
        yield name, full_values(engine, *engine.places[id(parameter)])
    for name, buffer in persistent(engine.model).items():
        here = buffer.detach().cpu().clone()
        # Rank 0's, as DDP has it: running statistics differ between a forward and the next. Flags cannot be summed.
        bits = here.view(torch.uint8) if here.dtype == torch.bool else here
        yield name, engine.wire.from_first(bits).view(here.dtype)


def full_values(engine: Engine, layer: int, slot: Slot) -> torch.Tensor:
    """A parameter in fp32 on the CPU, from the shards of all ranks."""
    full = torch.zeros(slot.numel, dtype=torch.float32)
    with engine.store.opened(layer) as data:
        for piece in data.pieces(slot):
            full[piece.inside] = (piece.master if slot.trainable else piece.weight).float().cpu()
    return engine.store.wire.sum(full).view(slot.shape)


def save_state(engine: Engine, folder: str | Path) -> None:
    engine.check_usable(reading=True)
    random = {"cpu": torch.get_rng_state()}
    if engine.device.type == "cuda":
        random["cuda"] = torch.cuda.get_rng_state(engine.device)
    save(
        folder,
        engine.store,
        optimizer=type(engine.store.optimizer).__name__,
        groups=engine.optimizer.saved(),
        steps=engine.steps,
        skipped=engine.skipped,
        counts=engine.counts,
        loss_scale=(engine.loss_scale.value, engine.loss_scale.good),
        rng=random,
        buffers=persistent(engine.model),
        also=engine.exchanging.saved(engine),
    )


def load_state(engine: Engine, folder: str | Path) -> None:
    engine.check_open()
    try:
        engine.updating.check()
    except RunError as error:  # so it stays, if there is nothing to load
        engine.broken = engine.broken or str(error)
    engine.updating.renew()
    engine.residents.abandon()
    if engine.pending:
        engine.discard()
    for layer in range(len(engine.store.homes)):
        engine.store.settled(layer)
    try:
        manifest, random, buffers = load(
            folder, engine.store, optimizer=type(engine.store.optimizer).__name__, also=partial(engine.exchanging.load, engine)
        )
    except CheckpointError:  # found before anything was written
        raise
    except BaseException as error:
        engine.broken = f"loading {folder} failed half-way ({error})"
        raise
    engine.broken = None
    engine.steps, engine.skipped = manifest.steps, manifest.skipped
    engine.rules.forget()
    if manifest.groups and not engine.optimizer.load(manifest.groups):
        warnings.warn(
            f"{folder} has {len(manifest.groups)} groups of parameters, the engine has {len(engine.optimizer.param_groups)}: "
            "their learning rates and other settings are not taken from there; set engine.lr",
            stacklevel=3,
        )
    engine.loss_scale.value, engine.loss_scale.good = manifest.loss_scale
    engine.counts = {name: entry.count for name, entry in manifest.entries.items() if entry.count}
    for name, buffer in persistent(engine.model).items():
        if name in buffers and buffers[name].shape == buffer.shape:
            buffer.copy_(buffers[name])
        elif name in buffers:
            engine.broken = f"buffer {name} has the shape {tuple(buffer.shape)}, {tuple(buffers[name].shape)} was saved"
            raise CheckpointError(f"{folder}: {engine.broken}")
    if random:
        torch.set_rng_state(random["cpu"])
        if "cuda" in random and engine.device.type == "cuda":
            torch.cuda.set_rng_state(random["cuda"], engine.device)
