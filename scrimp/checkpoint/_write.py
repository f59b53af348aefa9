"""Writes a safetensors file part by part, so that saving needs no second copy of the data.

The header with every tensor's dtype, shape and offsets comes first, and the space of the file is reserved with it. Then the parts
of the tensors come in any order, those of one tensor from its first element on. Each tensor has a checksum of its own.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from math import prod
from pathlib import Path

import torch

from scrimp.checkpoint._header import KINDS
from scrimp.checkpoint._manifest import FileRow
from scrimp.errors import CheckpointError
from scrimp.ledger import format_nbytes

Named = tuple[str, torch.dtype, tuple[int, ...], Callable[[], torch.Tensor]]
Row = tuple[str, torch.dtype, tuple[int, ...]]

BLOCK = 1 << 20  # bytes that are written and hashed at a time: they stay in the cache
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
NO_SUCH_CALL = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)


def file_nbytes(rows: Iterable[Row], metadata: Mapping[str, str] | None = None) -> int:
    """The size of a file with these tensors."""
    head, _, nbytes = _layout(list(rows), metadata)
    return len(head) + nbytes


class ShardFile:
    """A file that is being written. `close` ends it and returns its checksums; without it nothing of the file counts."""

    def __init__(self, path: Path, rows: Iterable[Row], metadata: Mapping[str, str] | None = None) -> None:
        self.path = path
        head, self._spans, nbytes = _layout(list(rows), metadata)
        self.nbytes = len(head) + nbytes
        self._first = len(head)
        self._digests = {name: hashlib.blake2b(digest_size=32) for name in self._spans}
        self._done = dict.fromkeys(self._spans, 0)
        self._header = hashlib.blake2b(head, digest_size=32).hexdigest()
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            self._reserve()
            self._write(head, 0)
        except BaseException:
            self.abandon()
            raise

    def append(self, name: str, part: torch.Tensor) -> None:
        """The next elements of a tensor."""
        part = part.detach().cpu().contiguous()
        start, stop = self._spans[name]
        if start + self._done[name] + part.nbytes > stop:
            raise CheckpointError(f"{self.path}: {name} has {stop - start} bytes, and more are written")
        view, digest = _bytes(part), self._digests[name]
        for at in range(0, len(view), BLOCK):
            block = view[at : at + BLOCK]
            self._write(block, self._first + start + self._done[name])
            digest.update(block)
            self._done[name] += len(block)

    def close(self) -> FileRow:
        """Flush to the disk."""
        missing = [name for name, (start, stop) in self._spans.items() if self._done[name] != stop - start]
        if missing:
            self.abandon()
            raise CheckpointError(f"{self.path}: only {self._done[missing[0]]} bytes of {missing[0]} were written")
        try:
            os.fsync(self._fd)
        except OSError as error:
            raise self._failed(error) from error
        finally:
            self.abandon()
        tensors = {name: digest.hexdigest() for name, digest in self._digests.items()}
        return FileRow(name=self.path.name, nbytes=self.nbytes, header=self._header, tensors=tensors)

    def abandon(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _reserve(self) -> None:
        """Finds a full disk before anything is written."""
        try:
            os.posix_fallocate(self._fd, 0, self.nbytes)
        except OSError as error:
            if error.errno not in NO_SUCH_CALL:
                raise self._failed(error) from error

    def _write(self, data: bytes | memoryview, at: int) -> None:
        try:
            while len(data):
                count = os.pwrite(self._fd, data, at)
                data, at = data[count:], at + count
        except OSError as error:
            raise self._failed(error) from error

    def _failed(self, error: OSError) -> CheckpointError:
        if error.errno not in NO_ROOM:
            return CheckpointError(f"{self.path} could not be written: {error.strerror}")
        free = shutil.disk_usage(self.path.parent).free + self.path.stat().st_blocks * 512
        return no_room(self.path, self.nbytes, free, error.strerror or "")


def no_room(path: Path, nbytes: int, free: int, why: str) -> CheckpointError:
    return CheckpointError(
        f"there is no room for {path}: it needs {format_nbytes(nbytes)} ({nbytes} bytes), {format_nbytes(free)} ({free} bytes) "
        f"are free there: {why}. Make room, for instance by scrimp.checkpoint.prune, or write to another disk"
    )


def _layout(rows: list[Row], metadata: Mapping[str, str] | None) -> tuple[bytes, dict[str, tuple[int, int]], int]:
    """The first bytes of the file, where each tensor is behind them, and the bytes of all tensors."""
    header: dict[str, object] = {} if metadata is None else {"__metadata__": dict(metadata)}
    spans, position = {}, 0
    for name, dtype, shape in rows:
        stop = position + prod(shape) * dtype.itemsize
        header[name] = {"dtype": KINDS[dtype], "shape": list(shape), "data_offsets": [position, stop]}
        spans[name] = (position, stop)
        position = stop
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, spans, position


def _bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor, without numpy, because torch no longer resizes a storage that numpy has viewed."""
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")
