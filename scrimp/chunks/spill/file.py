"""A file of the disk tier: named regions, written and read as a whole or in blocks.

The file is unlinked as soon as it is open, so that the system removes it however the process ends. Its space is reserved at once,
so that a full disk is found before training starts. The checksum of every block stays in memory: a read returns what was written,
or raises. Several threads may access different parts at once.

Page-aligned data bypasses the page cache, where the file system allows that. Elsewhere its pages are dropped from the cache after
each access.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import weakref
import zlib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType

import torch

from scrimp.chunks.spill.direct_io import PAGE, forget, open_direct
from scrimp.errors import FitError, RunError
from scrimp.ledger import format_nbytes

BLOCK = 1 << 20  # default bytes under one checksum; reads and writes begin and end at blocks
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class SpillFile:
    """`regions`: bytes of each region by its key. `label`: names the owner in errors. `blocks`: bytes of a region under one
    checksum. `buffered_because`: why there is no direct I/O, if there is none."""

    def __init__(
        self, folder: Path, regions: Mapping[str, int], label: str, blocks: Mapping[str, int] = MappingProxyType({})
    ) -> None:
        self.folder = Path(folder)
        self.label = label
        self.regions = dict(regions)
        self._block = {key: blocks.get(key, BLOCK) for key in regions}
        self.nbytes = 0
        self._starts: dict[str, int] = {}
        for key, nbytes in self.regions.items():  # regions start on pages, so that writing one never reads another
            self._starts[key] = self.nbytes
            self.nbytes += -(-nbytes // PAGE) * PAGE
        self._sums: dict[str, list[int | None]] = {}  # checksums of written regions; None for blocks without content
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            file = tempfile.TemporaryFile(dir=self.folder, prefix="scrimp-spill-", buffering=0)  # noqa: SIM115
        except OSError as error:
            raise RunError(
                f"{label}: a spill file of {format_nbytes(self.nbytes)} cannot be made in {self.folder}: {error.strerror}. "
                "Give Memory(disk=...) a folder that this user may write to"
            ) from error
        open_files: list[Callable[[], None]] = [file.close]
        self.close = weakref.finalize(self, _close_all, open_files)
        self._fd = file.fileno()
        self._direct: int | None = None
        self.buffered_because: str | None = None
        try:
            if self.nbytes:
                os.posix_fallocate(self._fd, 0, self.nbytes)
        except OSError as error:
            failure = self._no_room(error)
            self.close()
            raise failure from error
        try:
            if self.nbytes:
                self._direct = open_direct(self._fd)
                open_files.append(partial(os.close, self._direct))
        except OSError as error:
            self.buffered_because = f"{self.folder} has no direct I/O: {error.strerror}"

    def write(self, key: str, tensor: torch.Tensor, at: int = 0) -> None:
        """Write a tensor to a region, from byte `at` of it on. If that fails, these blocks count as empty."""
        view, block = self._view(key, tensor, at), self._block[key]
        first, count = at // block, -(-len(view) // block)
        sums = self._sums.setdefault(key, [None] * self._blocks(key))
        sums[first : first + count] = [None] * count
        found: list[int | None] = [zlib.crc32(view[start : start + block]) for start in range(0, len(view), block)]
        done, place = 0, self._starts[key] + at
        try:
            while done < len(view):
                fd, part = self._way(view, done, tensor.data_ptr() + done, place + done)
                done += os.pwrite(fd, part, place + done)
            if self.buffered_because and view:
                os.fdatasync(self._fd)  # only pages that are on the disk can be dropped from the cache
                forget(self._fd, place, len(view))
        except OSError as error:
            raise RunError(
                f"{self.label}: {self._place(key, at + min(done, len(view) - 1))} could not be written: {error.strerror}. "
                f"{self._free()}; load the last checkpoint, and give Memory(disk=...) another disk if it happens again"
            ) from error
        sums[first : first + count] = found

    def read(self, key: str, tensor: torch.Tensor, at: int = 0) -> None:
        """Read a region into a tensor, from byte `at` on. If the bytes are not those that were written, these blocks count as
        empty, and all bits of the tensor are set, which is NaN in every floating-point type."""
        view, block = self._view(key, tensor, at), self._block[key]
        first, count = at // block, -(-len(view) // block)
        sums = self._sums.get(key, [None] * self._blocks(key))[first : first + count]
        if None in sums or (not sums and key not in self._sums):
            raise RunError(f"{self.label}: region '{key}' of the spill file in {self.folder} holds nothing yet: write it first")
        where, wrong, cause = self._fill(view, tensor.data_ptr(), self._starts[key] + at, sums, block)
        if self.buffered_because and view:
            forget(self._fd, self._starts[key] + at, len(view))
        if wrong:
            self._sums[key][first : first + count] = [None] * count
            tensor.detach().reshape(-1).view(torch.uint8).fill_(255)
            raise RunError(
                f"{self.label}: {self._place(key, at + where)} {wrong}: "
                "the spill file was changed or the disk is failing; load the last checkpoint"
            ) from cause

    def _fill(
        self, view: memoryview, address: int, place: int, sums: list[int | None], block: int
    ) -> tuple[int, str | None, OSError | None]:
        """Reads and verifies; returns the position of a failure, its description, and the error behind it."""
        done = 0
        while done < len(view):
            try:
                fd, part = self._way(view, done, address + done, place + done)
                got = os.preadv(fd, [part], place + done)
            except OSError as error:
                return done, f"could not be read: {error.strerror}", error
            if not got:
                return done, f"has {done % block} of its {min(block, len(view) - done // block * block)} bytes", None
            done += got
        for index, expected in enumerate(sums):
            found = zlib.crc32(view[index * block : (index + 1) * block])
            if found != expected:
                return index * block, f"has the checksum {found:08x}, but {expected:08x} was written", None
        return 0, None, None

    def _way(self, view: memoryview, done: int, address: int, place: int) -> tuple[int, memoryview]:
        """Whole pages use direct I/O; the rest of a page, or unaligned data, uses the page cache."""
        pages = (len(view) - done) // PAGE * PAGE
        if self._direct is None or not pages or address % PAGE or place % PAGE:
            return self._fd, view[done:]
        return self._direct, view[done : done + pages]

    def _blocks(self, key: str) -> int:
        return -(-self.regions[key] // self._block[key])

    def _view(self, key: str, tensor: torch.Tensor, at: int) -> memoryview:
        if not self.close.alive:
            raise RunError(f"{self.label}: region '{key}' was requested, but the spill file in {self.folder} is closed")
        if key not in self.regions:
            some = ", ".join(list(self.regions)[:5])
            raise RunError(f"{self.label}: the spill file has no region '{key}'; it has {len(self.regions)}, such as {some}")
        end, block = at + tensor.nbytes, self._block[key]
        if at % block or end > self.regions[key] or (end % block and end != self.regions[key]):
            raise RunError(
                f"{self.label}: region '{key}' has {self.regions[key]} bytes, a tensor of shape {tuple(tensor.shape)} and "
                f"{tensor.dtype} has {tensor.nbytes}, from byte {at}; regions are written and read as a whole, or in "
                f"blocks of {block}"
            )
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            raise RunError(
                f"{self.label}: region '{key}' takes contiguous tensors on the CPU, not one on {tensor.device} of shape "
                f"{tuple(tensor.shape)} and strides {tensor.stride()}"
            )
        return tensor.detach().reshape(-1).view(torch.uint8).numpy().data

    def _place(self, key: str, at: int) -> str:
        block = at // self._block[key]
        return (
            f"region '{key}', block {block} of {self._blocks(key)}, "
            f"at byte {self._starts[key] + block * self._block[key]} of the spill file in {self.folder}"
        )

    def _free(self) -> str:
        return f"{format_nbytes(shutil.disk_usage(self._fd).free)} are free in {self.folder}"

    def _no_room(self, error: OSError) -> FitError | RunError:
        kind = FitError if error.errno in NO_ROOM else RunError
        return kind(
            f"{self.label}: no room for a spill file of {format_nbytes(self.nbytes)} ({self.nbytes} bytes): {error.strerror}. "
            f"{self._free()}. Make room there, give Memory(disk=...) a folder on a larger disk, or a larger Memory(host=...)"
        )


def _close_all(files: list[Callable[[], None]]) -> None:
    for close in files:
        close()
