"""Reads and writes an engine's state: parameters by name, and checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from scrimp._warnings import warn
from scrimp.checkpoint import Content, Save, Snapshot, buffer_nbytes, load, written_layers
from scrimp.chunks import DISK, Patterns, Slot
from scrimp.engine.setup.state_dict_names import persistent_buffers
from scrimp.errors import CheckpointError, RunError
from scrimp.ledger import format_nbytes

if TYPE_CHECKING:
    from scrimp.engine._training import Training

BUCKET = 1 << 20  # elements per collective when ranks gather small parameters


def persistent(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: buffer for name, _, _, buffer in persistent_buffers(model)}


def iter_state(engine: Training, only: Sequence[str] = ()) -> Iterator[tuple[str, torch.Tensor]]:
    engine.check_usable(reading=True)
    buffers = persistent(engine.model)
    chosen = select(only, [*engine.weights, *buffers]) if only else {*engine.weights, *buffers}
    named = [(name, *engine.places[id(parameter)]) for name, parameter in engine.weights.items() if name in chosen]
    while named:
        count = _together([slot.numel for _, _, slot in named])
        names, layers, slots = zip(*named[:count], strict=True)
        yield from zip(names, full_values(engine, list(zip(layers, slots, strict=True))), strict=True)
        named = named[count:]
    for name, buffer in buffers.items():
        if name not in chosen:
            continue
        here = buffer.detach().cpu().clone()
        # Rank 0's buffer, as in DDP: running statistics differ between ranks after a forward. Booleans cannot be summed.
        bits = here.view(torch.uint8) if here.dtype == torch.bool else here
        yield name, engine.wire.from_first(bits).view(here.dtype)


def select(names: Sequence[str], known: Sequence[str]) -> set[str]:
    """The known names that match one of `names`, which may be patterns; each of these must match one."""
    patterns = Patterns(names)
    found = {name: matched for name in known if (matched := patterns.matching(name))}
    for missing in sorted({*names}.difference(*found.values())):
        nearest = get_close_matches(missing, known, n=1)
        raise RunError(f"{missing!r} matches no parameter or buffer" + (f"; nearest: {nearest[0]!r}" if nearest else ""))
    return {*found}


def _together(sizes: list[int]) -> int:
    """How many of the first parameters to read by one collective: as many as fit into a bucket, and at least one."""
    total = 0
    for count, size in enumerate(sizes):
        total += size
        if count and total > BUCKET:
            return count
    return len(sizes)


def full_values(engine: Training, places: list[tuple[int, Slot]]) -> list[torch.Tensor]:
    """Parameters in fp32 on the CPU, from the shards of all ranks."""
    if engine.store.tiling is not None:
        return [_planned_values(engine, layer, slot) for layer, slot in places]
    full = torch.zeros(sum(slot.numel for _, slot in places), dtype=torch.float32)
    parts = torch.split(full, [slot.numel for _, slot in places])
    for layer, rows in groupby(zip(places, parts, strict=True), key=lambda row: row[0][0]):
        with engine.store.opened(layer) as data:
            for (_, slot), part in rows:
                for piece in data.pieces(slot):
                    part[piece.inside] = (piece.master if slot.trainable else piece.weight).float().cpu()
    full = engine.store.wire.sum(full)
    if len(places) == 1:
        return [full.view(places[0][1].shape)]
    parts = torch.split(full, [slot.numel for _, slot in places])
    return [part.view(slot.shape).clone() for part, (_, slot) in zip(parts, places, strict=True)]  # not a view of the bucket


def _planned_values(engine: Training, layer: int, slot: Slot) -> torch.Tensor:
    store = engine.store
    assert store.tiling is not None
    with store.opened(layer) as data:
        (piece,) = data.pieces(slot)
        mine = (piece.master if slot.trainable else piece.weight).to(engine.wire.device, torch.float32, copy=True)
    return store.tiling.whole(slot.name, mine).cpu()


def save_state(engine: Training, folder: str | Path, extra: Mapping[str, Any] | None = None, *, wait: bool = True) -> None:
    engine.check_usable(reading=True)
    engine.saves.finish()
    room_nbytes = _room_nbytes(engine)
    reason = None if wait else _must_wait(engine, room_nbytes)
    if not wait and bool(engine.wire.every(torch.tensor([int(reason is not None)])).any()):  # all ranks do the same
        reason = reason or "another rank must; see its warning"
    if reason is not None:
        warn(f"engine.save(wait=False) writes {folder} now, and returns when it is complete: {reason}")
    in_background = not wait and reason is None
    random = {"cpu": torch.get_rng_state()}
    if engine.device.type == "cuda":
        random["cuda"] = torch.cuda.get_rng_state(engine.device)
    buffers = persistent(engine.model)
    also = engine.exchanging.saved(engine)  # before the counts: packets of a sparse exchange count when they are applied
    content = Content(
        optimizer=type(engine.store.optimizer).__name__,
        groups=engine.optimizer.saved(),
        steps=engine.steps,
        skipped=engine.skipped,
        counts=dict(_counts(engine)),
        loss_scale=(engine.loss_scale.value, engine.loss_scale.good),
        rng=random,
        buffers={name: buffer.detach().cpu().clone() for name, buffer in buffers.items()} if in_background else buffers,
        also=also,
        extra=extra,
    )
    save = Save(folder, engine.store, content)
    if not in_background:
        save.run()
        return
    layers = list(written_layers(engine.store))
    if not engine.must_check:
        layers.reverse()  # updates begin in the backward
    try:
        snapshot = Snapshot(engine.store, room_nbytes, layers)
    except BaseException as error:  # of an update: the other ranks must hear of it
        save.give_up(error)
        raise
    engine.saves.start(save, snapshot, engine.store)


def _room_nbytes(engine: Training) -> int:
    """What steps leave of this rank's share of the host, for copies."""
    room, host = engine.store.host_room_nbytes, engine.ledger.host
    most = host.peak_nbytes - dict(host.peak.by_kind).get("snapshot", 0)
    return 1 << 62 if room is None else max(0, room - max(most, host.total_nbytes))


def _must_wait(engine: Training, room_nbytes: int) -> str | None:
    """Why a save cannot run in the background, if it cannot."""
    store = engine.store
    if engine.closed:
        return "the engine is closed"
    if store.sparse:
        return "with a sparse exchange residuals change in every backward, and have no copy to write from"
    if store.tiling is not None and any(placement.tier == DISK for placement in store.placements):
        return "under a plan, layers on disk are read as a whole, into memory that their updates need"
    if buffer_nbytes(store) > room_nbytes:
        return (
            f"layers on disk are read through {format_nbytes(buffer_nbytes(store))} of host memory, and Memory(host=...) leaves "
            f"{format_nbytes(room_nbytes)} to this rank"
        )
    return None


def _counts(engine: Training) -> dict[str, int]:
    """Updates of each parameter; under a plan those of all pipeline stages, each of which counts its own."""
    if engine.store.tiling is None:
        return engine.counts
    names = [slot.name for layer in engine.store.table.layers for slot in layer.slots]
    every = engine.wire.every(torch.tensor([engine.counts.get(name, 0) for name in names])).amax(0)
    return dict(zip(names, every.tolist(), strict=True))


def load_state(engine: Training, folder: str | Path) -> dict[str, Any]:
    engine.check_open()
    engine.saves.finish()
    try:
        engine.updating.check()
    except RunError as error:  # remembered in case the checkpoint cannot be loaded
        engine.broken = engine.broken or str(error)
    engine.updating.renew()
    engine.residents.abandon()
    if engine.pending:
        engine.discard()
    for layer in range(len(engine.store.placements)):
        engine.store.settled(layer)
    try:
        manifest, random, buffers = load(
            folder, engine.store, optimizer=type(engine.store.optimizer).__name__, also=partial(engine.exchanging.load, engine)
        )
    except CheckpointError:  # raised before anything was written
        raise
    except BaseException as error:
        engine.broken = f"loading {folder} failed half-way ({error})"
        raise
    engine.broken = None
    engine.steps, engine.skipped = manifest.steps, manifest.skipped
    engine.rules.forget()
    if manifest.groups and not engine.optimizer.load(manifest.groups):
        warn(
            f"{folder} has {len(manifest.groups)} groups of parameters, the engine has {len(engine.optimizer.param_groups)}: "
            "the engine does not load their learning rates and other settings; set engine.lr"
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
    return manifest.extra
