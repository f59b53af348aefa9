"""Writes a checkpoint again, for another number of ranks: the same parameters, each divided evenly over as many files.

`engine.load` reads any checkpoint at any number of ranks. This is for moving one: as one file, or as one file for each rank, so
that each rank reads only its own.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch

from scrimp.checkpoint._manifest import NAME, Entry, Extent
from scrimp.checkpoint._read import Checkpoint
from scrimp.checkpoint._save import UNFINISHED, check_goal, commit, flush
from scrimp.checkpoint._write import Row, ShardFile
from scrimp.chunks import BLOCK, Field
from scrimp.errors import CheckpointError


def reshard(source: str | Path, goal: str | Path, ranks: int) -> list[str]:
    """Write a checkpoint for so many ranks. All checksums of the source are compared first. Memory does not grow with the
    checkpoint. Returns what could not be kept.

    >>> import scrimp
    >>> from scrimp import zoo
    >>> with scrimp.Engine(zoo.build("gpt-tiny"), memory="1GiB", device="cpu") as engine:
    ...     engine.save("one")
    >>> scrimp.checkpoint.reshard("one", "four", ranks=4)
    ['random state: it belongs to 1 rank; ranks that load the new checkpoint begin with their own']
    """
    if ranks < 1:
        raise CheckpointError(f"ranks is {ranks}: a checkpoint has 1 file or more")
    old, goal = Checkpoint(source), Path(os.path.abspath(goal))
    if goal == Path(os.path.abspath(old.folder)):
        raise CheckpointError(f"{goal} is the checkpoint itself: give another folder")
    old.verify()
    small, lost = _small(old, ranks)
    check_goal(goal)
    entries, layers = _entries(old, ranks), sorted({entry.layer for entry in old.manifest.entries.values()})
    rows: list[list[Row]] = [[(n, t.dtype, tuple(t.shape)) for n, t in each.items()] for each in small]
    for layer in layers:
        for rank, more in enumerate(_layer_rows(old, entries, layer, ranks)):
            rows[rank] += more
    work = goal.with_name(goal.name + UNFINISHED)
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    try:
        with ExitStack() as stack:
            files = []
            for rank in range(ranks):
                files.append(ShardFile(work / f"rank-{rank}.safetensors", rows[rank]))
                stack.callback(files[-1].abandon)
                for name, tensor in small[rank].items():
                    files[-1].append(name, tensor)
            for layer in layers:
                _write_layer(old, entries, layer, files)
            manifest = replace(old.manifest, entries=entries, files=tuple(file.close() for file in files))
        (work / NAME).write_text(manifest.to_json())
        flush(work / NAME)
        commit(work, goal)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    return lost


def _small(old: Checkpoint, ranks: int) -> tuple[list[dict[str, torch.Tensor]], list[str]]:
    """The tensors of no layer, for each new file, and what is lost of them."""
    count, lost = len(old.manifest.files), []
    found: list[dict[str, torch.Tensor]] = [{} for _ in range(ranks)]
    for rank in range(count):
        if any(name.startswith("exchange.") for name in old.headers[rank]):
            raise CheckpointError(
                f"{old.folder} is of a run with sparse exchange: residuals belong to the {count} ranks that saved it. "
                "engine.load divides them among other ranks; save again after it"
            )
        kept = old.small(rank)
        if rank < ranks:
            found[rank] = {name: tensor for name, tensor in kept.items() if count == ranks or not name.startswith("rng.")}
    if count != ranks:
        those = f"{count} rank{'' if count == 1 else 's'}"
        lost.append(f"random state: it belongs to {those}; ranks that load the new checkpoint begin with their own")
    return found, lost


def _shares(numel: int, ranks: int) -> Iterator[tuple[int, int]]:
    """[start, stop) of each rank; they begin at whole blocks of 8-bit states."""
    blocks = -(-numel // BLOCK)
    for rank in range(ranks):
        yield min(numel, blocks * rank // ranks * BLOCK), min(numel, blocks * (rank + 1) // ranks * BLOCK)


def _entries(old: Checkpoint, ranks: int) -> dict[str, Entry]:
    """With new extents. Trained parameters of a layer come first in the old manifest, and do here."""
    ends: dict[int, list[int]] = {}
    found = {}
    for name, entry in sorted(old.manifest.entries.items(), key=lambda item: not item[1].trainable):
        end = ends.setdefault(entry.layer, [0] * ranks)
        extents = []
        for rank, (start, stop) in enumerate(_shares(entry_numel(entry), ranks)):
            if start < stop or entry_numel(entry) == rank == 0:
                extents.append(Extent(start=start, length=stop - start, rank=rank, place=end[rank]))
                end[rank] += -(-(stop - start) // BLOCK) * BLOCK
        found[name] = replace(entry, extents=tuple(extents))
    return {name: found[name] for name in old.manifest.entries}


def entry_numel(entry: Entry) -> int:
    return sum(each.length for each in entry.extents)


def _of(entries: dict[str, Entry], layer: int, *, trained: bool) -> list[tuple[str, Entry]]:
    """A layer's parameters in the order of their places."""
    rows = [(name, entry) for name, entry in entries.items() if entry.layer == layer and (entry.trainable or not trained)]
    return sorted(rows, key=lambda row: not row[1].trainable)


def _layer_rows(old: Checkpoint, entries: dict[str, Entry], layer: int, ranks: int) -> list[list[Row]]:
    rows: list[list[Row]] = [[] for _ in range(ranks)]
    for key, field in _tensors(old, entries, layer):
        for rank in range(ranks):
            end = 0
            for _, entry in _of(entries, layer, trained=key != "weights"):
                end += sum(-(-each.length // BLOCK) * BLOCK for each in entry.extents if each.rank == rank)
            rows[rank].append((f"{key}.{layer}", field.dtype, (field.numel(end),)))
    return rows


def _tensors(old: Checkpoint, entries: dict[str, Entry], layer: int) -> list[tuple[str, Field]]:
    """The tensors of a layer: those of a trained parameter, if it has one."""
    rows = _of(entries, layer, trained=False)
    return list(old.tensors(rows[0][1])) if rows else []


def _write_layer(old: Checkpoint, entries: dict[str, Entry], layer: int, files: list[ShardFile]) -> None:
    for key, field in _tensors(old, entries, layer):
        for name, entry in _of(entries, layer, trained=key != "weights"):
            position, todo = 0, list(entry.extents)
            for part in old.parts(name, key):
                while part.numel() and todo:
                    stop = field.numel(todo[0].start + todo[0].length)
                    count = min(part.numel(), stop - position)
                    files[todo[0].rank].append(f"{key}.{layer}", part[:count])
                    part, position = part[count:], position + count
                    if position == stop:
                        each = todo.pop(0)
                        gap = -(-each.length // BLOCK) * BLOCK - each.length
                        zeros = field.numel(each.length + gap) - field.numel(each.length)
                        files[each.rank].append(f"{key}.{layer}", torch.zeros(zeros, dtype=field.dtype))
