"""Checksums: which file, and which tensor in it, is not what was written."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from scrimp.checkpoint._header import Stored, read_header
from scrimp.checkpoint._manifest import Manifest
from scrimp.errors import CheckpointError

BLOCK = 1 << 22
Wanted = Callable[[int, str], bool]  # whether a tensor of a file counts, by the file's number and the tensor's name


def check_files(where: Path, manifest: Manifest, wanted: Wanted = lambda file, name: True) -> None:
    """Raise the first fault; nothing of the files may be used before."""
    for fault in faults(where, manifest, wanted):
        raise CheckpointError(fault)


def faults(where: Path, manifest: Manifest, wanted: Wanted = lambda file, name: True) -> Iterator[str]:
    """What is wrong with the files of a checkpoint."""
    for number, row in enumerate(manifest.files):
        path = where / row.name
        try:
            stored, header = read_header(path)
            if row.checksum is not None:  # up to version 3
                found = _digest(path, 0, path.stat().st_size)
                if found != row.checksum:
                    yield f"{path} is damaged: its checksum is {_short(found)}, the manifest says {_short(row.checksum)}"
                yield from _short_of(path, number, manifest, stored)
                continue
            yield from _row_faults(where, manifest, number, stored, header, wanted)
            yield from _short_of(path, number, manifest, stored)
        except CheckpointError as error:
            yield str(error)


def _row_faults(
    where: Path, manifest: Manifest, number: int, stored: dict[str, Stored], header: bytes, wanted: Wanted
) -> Iterator[str]:
    row, path = manifest.files[number], where / manifest.files[number].name
    found = hashlib.blake2b(header, digest_size=32).hexdigest()
    if found != row.header or stored.keys() != row.tensors.keys():
        other = next((o.name for o in manifest.files if o.header == found and o.name != row.name), None)
        swapped = f"; it is the header of {other}" if other else ""
        yield (
            f"{path} is damaged: the checksum of its header is {_short(found)}, the manifest says {_short(row.header)}{swapped}"
        )
        return
    for name, tensor in stored.items():
        if not wanted(number, name):
            continue
        digest, said = _digest(path, tensor.start, tensor.nbytes), row.tensors[name]
        if digest != said:
            other = next((o.name for o in manifest.files if o is not row and o.tensors.get(name) == digest), None)
            swapped = f"; it is that of {other}" if other else ""
            yield (
                f"{path} is damaged: tensor {name} (bytes {tensor.start} to {tensor.start + tensor.nbytes}) has the checksum "
                f"{_short(digest)}, the manifest says {_short(said)}{swapped}"
            )


def _short_of(path: Path, number: int, manifest: Manifest, stored: dict[str, Stored]) -> Iterator[str]:
    """Parts of parameters that the manifest says are in the file, beyond the file's tensors."""
    for name, entry in manifest.entries.items():
        there = stored.get(f"weights.{entry.layer}")
        has = 0 if there is None else there.numel
        last = max((each.place + each.length for each in entry.extents if each.rank == number and each.length), default=0)
        if last > has:
            yield f"{path} is damaged: it has {has} elements of weights.{entry.layer}, and {name} ends at {last}"
            return


def _digest(path: Path, start: int, nbytes: int) -> str:
    digest, stop = hashlib.blake2b(digest_size=32), start + nbytes
    try:
        with path.open("rb", buffering=0) as file:
            while start < stop:
                block = os.pread(file.fileno(), min(BLOCK, stop - start), start)
                if not block:
                    raise CheckpointError(f"{path} is damaged: it ends at byte {start}")
                digest.update(block)
                start += len(block)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    return digest.hexdigest()


def _short(checksum: str | None) -> str:
    return f"{str(checksum)[:16]}..."
