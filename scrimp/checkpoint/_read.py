"""An opened checkpoint, without an engine: parameters by name, a part at a time, read without mapping files into memory.

Nothing is allocated before the manifest, the headers and the sizes of the files agree.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cached_property
from math import prod
from pathlib import Path

import torch

from scrimp.checkpoint._header import Stored, read_header
from scrimp.checkpoint._load import found_at
from scrimp.checkpoint._manifest import Entry, Manifest
from scrimp.checkpoint._verify import check_files, faults
from scrimp.chunks import DTYPES, Field, state_fields
from scrimp.errors import CheckpointError

PART = 1 << 22  # elements that are read at a time


class Checkpoint:
    """A complete checkpoint in a folder.

    `verify` compares all checksums; the other methods trust the files.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = found_at(folder)
        self.manifest = Manifest.read(self.folder)

    @cached_property
    def headers(self) -> list[dict[str, Stored]]:
        """The tensors of each file. Raises if a file is missing or has another size, or if the manifest speaks of more."""
        check_files(self.folder, self.manifest, lambda file, name: False)
        found = [read_header(self.folder / row.name)[0] for row in self.manifest.files]
        for name, entry in self.manifest.entries.items():
            for key, field in self.tensors(entry):
                for each in entry.extents:
                    there = found[each.rank].get(f"{key}.{entry.layer}")
                    stop = field.numel(each.place + each.length)
                    if each.length and (there is None or stop > there.numel or there.dtype != field.dtype):
                        have = "none" if there is None else f"{there.numel} of {there.dtype}"
                        raise CheckpointError(
                            f"{self.folder / self.manifest.files[each.rank].name} is damaged: {name} ends at element {stop} "
                            f"({field.dtype}) of {key}.{entry.layer}, of which it has {have}"
                        )
        return found

    def faults(self) -> Iterator[str]:
        """What is wrong with the files, by file and tensor; all checksums are compared."""
        return faults(self.folder, self.manifest)

    def verify(self) -> None:
        """Raise the first fault."""
        check_files(self.folder, self.manifest)

    def tensors(self, entry: Entry) -> Iterator[tuple[str, Field]]:
        """What a layer's tensors hold of a parameter: the beginning of their names, and their format."""
        dtype = torch.float32 if entry.own_master else DTYPES[self.manifest.precision]
        yield "weights", Field(dtype=dtype)
        if entry.trainable:
            if not entry.own_master:
                yield "master", Field(dtype=torch.float32)
            for k, field in enumerate(state_fields(self.manifest.states, self.manifest.state)):
                yield f"state-{k}", field

    def values(self, name: str, dtype: torch.dtype | None = None) -> Iterator[torch.Tensor]:
        """A parameter in order, flat, in parts: the fp32 master if it is trained, else the weight, cast to `dtype`."""
        entry = self.manifest.entries[name]
        key = "master" if entry.trainable and not entry.own_master else "weights"
        for part in self.parts(name, key):
            yield part if dtype is None else part.to(dtype)

    def parts(self, name: str, key: str) -> Iterator[torch.Tensor]:
        """One tensor of a parameter in order, flat, in parts of a few million elements. A parameter that a plan has split comes
        in rows of its first dim, or where that is not possible, as a whole."""
        entry = self.manifest.entries[name]
        field = dict(self.tensors(entry))[key]
        if any(each.box is not None for each in entry.extents):
            yield from self._boxed(entry, f"{key}.{entry.layer}")
            return
        position = 0
        for each in sorted(entry.extents, key=lambda each: each.start):
            if each.start != position:
                raise CheckpointError(f"{self.folder} is damaged: {name} has no element {position}")
            position += each.length
            for start in range(0, each.length, PART):
                stop = min(start + PART, each.length)
                yield self._read(each.rank, f"{key}.{entry.layer}", field.span(slice(each.place + start, each.place + stop)))

    def small(self, file: int) -> dict[str, torch.Tensor]:
        """The tensors of a file that are of no layer: random state, buffers, residuals."""
        kinds = ("weights", "master", "state-")
        return {
            name: self._read(file, name, slice(0, there.numel)).view(there.shape)
            for name, there in self.headers[file].items()
            if not name.startswith(kinds)
        }

    def _boxed(self, entry: Entry, key: str) -> Iterator[torch.Tensor]:
        """A range of the first factor at a time, of all boxes that have a part of it."""
        boxes = [each.box for each in entry.extents if each.box is not None]
        sizes = [size for size, _, _ in boxes[0]]
        if any([size for size, _, _ in box] != sizes for box in boxes):
            raise CheckpointError(f"{self.folder} is damaged: parts of one parameter have other factors: {boxes[:2]}")
        rest = prod(sizes[1:])
        rows = max(1, PART // max(1, rest))
        for first in range(0, sizes[0] if sizes else 1, rows):
            last = min(first + rows, sizes[0]) if sizes else 1
            made = torch.empty([last - first, *sizes[1:]], dtype=self._dtype(entry, key))
            for box in dict.fromkeys(boxes):
                begin, end = (max(first, box[0][1]), min(last, box[0][1] + box[0][2])) if box else (0, 1)
                if begin >= end:
                    continue
                inner = prod(length for _, _, length in box[1:])
                offset = (begin - box[0][1]) * inner if box else 0
                tile = torch.empty((end - begin) * inner, dtype=made.dtype)
                self._fill(entry, key, box, offset, tile)
                into = made.narrow(0, begin - first, end - begin)
                for dim, (_, start, length) in enumerate(box[1:], 1):
                    into = into.narrow(dim, start, length)
                into.copy_(tile.view(into.shape))
            yield made.view(-1)

    def _fill(self, entry: Entry, key: str, box: object, offset: int, tile: torch.Tensor) -> None:
        """Elements of a box from `offset` on."""
        for each in entry.extents:
            start, stop = max(each.start, offset), min(each.start + each.length, offset + tile.numel())
            if each.box == box and start < stop:
                place = each.place + start - each.start
                tile[start - offset : stop - offset] = self._read(each.rank, key, slice(place, place + stop - start))

    def _dtype(self, entry: Entry, key: str) -> torch.dtype:
        return self.headers[entry.extents[0].rank][key].dtype

    def _read(self, file: int, name: str, span: slice) -> torch.Tensor:
        there, path = self.headers[file][name], self.folder / self.manifest.files[file].name
        return read_elements(path, there, span)


def read_elements(path: Path, there: Stored, span: slice) -> torch.Tensor:
    """Some elements of a tensor in a file, flat."""
    tensor = torch.empty(span.stop - span.start, dtype=there.dtype)
    if not tensor.numel():
        return tensor
    view = tensor.view(torch.uint8).numpy().data
    done, start = 0, there.start + span.start * there.dtype.itemsize
    with path.open("rb", buffering=0) as file:
        while done < len(view):
            got = os.preadv(file.fileno(), [view[done:]], start + done)
            if not got:
                raise CheckpointError(f"{path} is damaged: it ends at byte {start + done}")
            done += got
    return tensor
