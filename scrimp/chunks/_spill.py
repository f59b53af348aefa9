"""The disk tier's file: named regions that are written and read as a whole.

The file has no name from the moment it is open, so that the system removes it however the process ends. Its space is
reserved at once, so that a full disk is found before training, not in the middle of it. Every block's checksum stays in
memory: what comes back is what was written, or an error.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import weakref
import zlib
from collections.abc import Mapping
from pathlib import Path

import torch

from scrimp.errors import FitError, RunError
from scrimp.ledger import format_nbytes

BLOCK = 1 << 20  # bytes under one checksum
PAGE = 1 << 12  # regions start on pages, so that writing one never reads another's
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class SpillFile:
    """`regions` are the bytes of each region by its key; `label` says in errors whose file this is."""

    def __init__(self, folder: Path, regions: Mapping[str, int], label: str) -> None:
        self.folder = Path(folder)
        self.label = label
        self.regions = dict(regions)
        self.nbytes = 0
        self._starts: dict[str, int] = {}
        for key, nbytes in self.regions.items():
            self._starts[key] = self.nbytes
            self.nbytes += -(-nbytes // PAGE) * PAGE
        self._sums: dict[str, list[int]] = {}  # of the regions that hold something
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            file = tempfile.TemporaryFile(dir=self.folder, prefix="scrimp-spill-", buffering=0)  # noqa: SIM115
        except OSError as error:
            raise RunError(
                f"{label}: a spill file of {format_nbytes(self.nbytes)} cannot be made in {self.folder}: {error.strerror}. "
                "Give Memory(disk=...) a folder that this user may write to"
            ) from error
        self.close = weakref.finalize(self, file.close)
        self._fd = file.fileno()
        try:
            if self.nbytes:
                os.posix_fallocate(self._fd, 0, self.nbytes)
        except OSError as error:
            failure = self._no_room(error)
            self.close()
            raise failure from error

    def write(self, key: str, tensor: torch.Tensor) -> None:
        """Put a tensor's bytes in a region. If that fails, the region holds nothing."""
        view, start = self._view(key, tensor), self._starts[key]
        self._sums.pop(key, None)
        sums = []
        for at in range(0, len(view), BLOCK):
            block = view[at : at + BLOCK]
            sums.append(zlib.crc32(block))
            done = 0
            while done < len(block):
                try:
                    done += os.pwrite(self._fd, block[done:], start + at + done)
                except OSError as error:
                    raise RunError(
                        f"{self.label}: {self._place(key, at)} could not be written: {error.strerror}. "
                        f"{self._free()}; load the last checkpoint, and give Memory(disk=...) another disk if it happens again"
                    ) from error
        self._sums[key] = sums

    def read(self, key: str, tensor: torch.Tensor) -> None:
        """Fill a tensor with what its region holds. If that is not what was written, the region holds nothing from then
        on, and the tensor is all ones in its bits, which is NaN in every floating-point type."""
        view = self._view(key, tensor)
        sums = self._sums.get(key)
        if sums is None:
            raise RunError(f"{self.label}: region '{key}' of the spill file in {self.folder} holds nothing yet: write it first")
        for index, expected in enumerate(sums):
            at = index * BLOCK
            wrong, cause = self._read_block(view[at : at + BLOCK], self._starts[key] + at, expected)
            if wrong:
                del self._sums[key]
                tensor.detach().reshape(-1).view(torch.uint8).fill_(255)
                raise RunError(
                    f"{self.label}: {self._place(key, at)} {wrong}: "
                    "the spill file was changed or the disk is failing; load the last checkpoint"
                ) from cause

    def _read_block(self, block: memoryview, start: int, expected: int) -> tuple[str | None, OSError | None]:
        """What is wrong with it, in words, and the error behind that."""
        done = 0
        while done < len(block):
            try:
                got = os.preadv(self._fd, [block[done:]], start + done)
            except OSError as error:
                return f"could not be read: {error.strerror}", error
            if not got:
                return f"has {done} of its {len(block)} bytes", None
            done += got
        found = zlib.crc32(block)
        return None if found == expected else f"has the checksum {found:08x}, but {expected:08x} was written", None

    def _view(self, key: str, tensor: torch.Tensor) -> memoryview:
        if not self.close.alive:
            raise RunError(f"{self.label}: region '{key}' was asked for, but the spill file in {self.folder} is closed")
        if key not in self.regions:
            some = ", ".join(list(self.regions)[:5])
            raise RunError(f"{self.label}: the spill file has no region '{key}'; it has {len(self.regions)}, such as {some}")
        if tensor.nbytes != self.regions[key]:
            raise RunError(
                f"{self.label}: region '{key}' has {self.regions[key]} bytes, a tensor of shape {tuple(tensor.shape)} and "
                f"{tensor.dtype} has {tensor.nbytes}; regions are written and read as a whole"
            )
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            raise RunError(
                f"{self.label}: region '{key}' takes contiguous tensors on the CPU, not one on {tensor.device} of shape "
                f"{tuple(tensor.shape)} and strides {tensor.stride()}"
            )
        return tensor.detach().reshape(-1).view(torch.uint8).numpy().data

    def _place(self, key: str, at: int) -> str:
        return (
            f"region '{key}', block {at // BLOCK} of {-(-self.regions[key] // BLOCK)}, "
            f"at byte {self._starts[key] + at} of the spill file in {self.folder}"
        )

    def _free(self) -> str:
        return f"{format_nbytes(shutil.disk_usage(self._fd).free)} are free in {self.folder}"

    def _no_room(self, error: OSError) -> FitError | RunError:
        kind = FitError if error.errno in NO_ROOM else RunError
        return kind(
            f"{self.label}: no room for a spill file of {format_nbytes(self.nbytes)} ({self.nbytes} bytes): {error.strerror}. "
            f"{self._free()}. Make room there, give Memory(disk=...) a folder on a larger disk, or a larger Memory(host=...)"
        )
