"""Loading: every rank reads from every file only the parts in its own shards. States saved with another codec than the engine's
are converted, a tile at a time."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from scrimp._warnings import warn
from scrimp.checkpoint._agree import together
from scrimp.checkpoint._manifest import Entry, Manifest
from scrimp.checkpoint._save import ASIDE
from scrimp.checkpoint._tiles import whole
from scrimp.checkpoint._verify import check_files
from scrimp.chunks import CODECS, Coder, Opened, Optimizer, Piece, Slot, Store, coder_numel, state_fields
from scrimp.errors import CheckpointError

TILE = 1 << 18
Loaded = tuple[Manifest, dict[str, torch.Tensor], dict[str, torch.Tensor]]


def load(folder: str | Path, store: Store, *, optimizer: str, also: Callable[[list[Any]], None]) -> Loaded:
    """Fill the store. Returns the manifest, this rank's random state if as many ranks wrote the checkpoint, and the buffers.
    `also` receives the files of all ranks."""
    where = found_at(folder)
    with together(store.ranks, where, "loaded"):
        manifest = Manifest.read(where)
        _compare(where, manifest, store, optimizer)
        check_files(where, manifest, _wanted(manifest, store))
    with ExitStack() as stack:
        files = [stack.enter_context(safe_open(where / row.name, "pt")) for row in manifest.files]
        for index, layer in enumerate(store.table.layers):
            with store.opened(index, write=True, read=False) as data:
                for slot in (slot for slot in layer.slots if slot.held):
                    entry = manifest.entries[slot.name]
                    if store.tiling is not None or any(extent.box is not None for extent in entry.extents):
                        _fill_whole(files, entry, data, slot, store)
                        continue
                    for piece in data.pieces(slot):
                        _fill(files, entry, piece, manifest.state, store.optimizer)
        also(files)
        same = len(manifest.files) == store.ranks.world
        rng = _named(files[store.ranks.rank], "rng.") if same else {}
        buffers = _named(files[0], "buffer.")
    return manifest, rng, buffers


def found_at(folder: str | Path) -> Path:
    """A checkpoint's folder; the one it was moved aside to, if a save over it was killed between its two renames."""
    where = Path(folder)
    aside = where.with_name(where.name + ASIDE)
    return aside if not where.exists() and aside.exists() else where


def _wanted(manifest: Manifest, store: Store) -> Callable[[int, str], bool]:
    """The tensors that this rank may read: those of layers in whose extents it has a part, and all that are of no layer."""
    there = set()
    for index, layer in enumerate(store.table.layers):
        for slot in (slot for slot in layer.slots if slot.held):
            entry = manifest.entries[slot.name]
            mine = [spans.inside for spans in store.shards.pieces(index, slot)] if store.tiling is None else []
            for each in entry.extents:
                apart = [p for p in mine if p.stop > each.start and p.start < each.start + each.length]
                if apart or store.tiling is not None or each.box is not None:
                    there.add((each.rank, str(entry.layer)))

    def wanted(file: int, name: str) -> bool:
        kind, _, layer = name.partition(".")
        return not (kind in ("weights", "master") or kind.startswith("state-")) or (file, layer) in there

    return wanted


def _named(file: Any, prefix: str) -> dict[str, torch.Tensor]:
    names = [key for key in file.keys() if key.startswith(prefix)]  # noqa: SIM118 - a file handle is no dict
    return {key.removeprefix(prefix): file.get_tensor(key) for key in names}


def _fill(files: list[Any], entry: Entry, piece: Piece, saved: str, optimizer: Optimizer) -> None:
    """Fills a piece from all extents that overlap it; `saved` is the codec of the saved states."""
    for extent in entry.extents:
        begin = max(extent.start, piece.inside.start)
        end = min(extent.start + extent.length, piece.inside.stop)
        if begin >= end:
            continue
        into = slice(begin - piece.inside.start, end - piece.inside.start)
        out = slice(extent.place + begin - extent.start, extent.place + end - extent.start)
        file = files[extent.rank]
        piece.weight[into].copy_(file.get_slice(f"weights.{entry.layer}")[out])
        if entry.trainable:
            if not entry.own_master:
                piece.master[into].copy_(file.get_slice(f"master.{entry.layer}")[out])
            states = [file.get_slice(f"state-{k}.{entry.layer}") for k in range(len(state_fields(optimizer.states, saved)))]
            if saved != optimizer.state:
                _recode(states, out, piece, into, entry.count, encode=saved == "fp32")
                continue
            for state, source, field in zip(piece.states, states, optimizer.fields, strict=True):
                state[field.span(into)].copy_(source[field.span(out)])


def _fill_whole(files: list[Any], entry: Entry, data: Opened, slot: Slot, store: Store) -> None:
    """Where a plan splits the parameter here, or did when it was saved: by way of the whole parameter, one of its tensors at a
    time."""

    def mine(key: str) -> torch.Tensor:
        found = whole(files, entry, key)
        return found.view(-1) if store.tiling is None else store.tiling.cut(slot.name, found)

    weights = mine("weights")
    if slot.share is not None:
        data.weights[slot.start : slot.stop].copy_(weights)
    for piece in data.pieces(slot):
        piece.weight.copy_(weights[piece.inside])
    if not entry.trainable:
        return
    if not entry.own_master:
        master = mine("master")
        for piece in data.pieces(slot):
            piece.master.copy_(master[piece.inside])
    for k in range(store.optimizer.states):
        state = mine(f"state-{k}")
        for piece in data.pieces(slot):
            piece.states[k].copy_(state[piece.inside])


def _recode(sources: list[Any], out: slice, piece: Piece, into: slice, count: int, *, encode: bool) -> None:
    coded = state_fields(2, "int8")
    coder = Coder(torch.empty(coder_numel(min(TILE, out.stop - out.start)), device="cpu"))
    for start in range(0, out.stop - out.start, TILE):
        numel = min(TILE, out.stop - out.start - start)
        source, target = (slice(whole.start + start, whole.start + start + numel) for whole in (out, into))
        tile = slice(0, numel)
        if encode:
            states = [torch.empty(field.numel(numel), dtype=field.dtype, device="cpu") for field in coded]
            for moment, saved in zip(coder.moments(tile), sources, strict=True):
                moment.copy_(saved[source])
            coder.encode(states, tile, place=piece.inside.start + target.start, count=count)
            for state, field, made in zip(piece.states, coded, states, strict=True):
                state[field.span(target)].copy_(made)
        else:
            found = [saved[field.span(source)] for saved, field in zip(sources, coded, strict=True)]
            for state, moment in zip(piece.states, coder.decode(found, tile), strict=True):
                state[target].copy_(moment)


def _compare(where: Path, manifest: Manifest, store: Store, optimizer: str) -> None:
    tiling = store.tiling
    have = {
        slot.name: (slot.shape if tiling is None else tiling.shape(slot.name), slot.trainable)
        for layer in store.table.layers
        for slot in layer.slots
    }
    saved = {name: (entry.shape, entry.trainable) for name, entry in manifest.entries.items()}
    if have != saved:
        missing, extra = sorted({*have} - {*saved}), sorted({*saved} - {*have})
        other = [
            f"{name}: {saved[name]} saved, {have[name]} here" for name in have if name in saved and have[name] != saved[name]
        ]
        raise CheckpointError(f"{where} holds another model: missing {missing[:3]}, not known {extra[:3]}, different {other[:3]}")
    if manifest.precision != store.precision:
        raise CheckpointError(f"{where} was saved in {manifest.precision}, the engine runs in {store.precision}")
    if (manifest.optimizer, manifest.states) != (optimizer, store.optimizer.states):
        raise CheckpointError(
            f"{where} was saved with {manifest.optimizer} of {manifest.states} states, "
            f"the engine has {optimizer} of {store.optimizer.states}"
        )
    if manifest.state not in CODECS:
        raise CheckpointError(f"{where} was saved with {manifest.state!r} states; this scrimp knows {CODECS}")
    split = tiling is not None or any(extent.box is not None for entry in manifest.entries.values() for extent in entry.extents)
    if split and {manifest.state, store.optimizer.state} != {"fp32"}:
        raise CheckpointError(
            f"{where} was saved with {manifest.state} states, the engine has {store.optimizer.state}: between a run with a plan "
            "and one without only fp32 states can be read; load it without a plan, with AdamW(state='fp32'), and save again"
        )
    if manifest.state != store.optimizer.state:
        warn(
            f"{where} was saved with {manifest.state} states, the engine keeps them in {store.optimizer.state}: they are "
            "converted, so the run continues with different numerical results"
        )
