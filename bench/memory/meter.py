"""The most memory that a contender had, by counters that are nobody's own.

On CUDA the allocator's `max_memory_allocated`; who resets it in between is listened to first. On the CPU the C library's
high-water mark of mapped bytes: unlike torch's profiler it sees what every thread allocates and frees (DDP's hooks run in
gloo's), and unlike the resident size neither code nor pages that nobody touched. It cannot be set back, so it is for a
process of one contender; where many steps are to be compared in one process, and by one thread, the profiler serves.
"""

from __future__ import annotations

import ctypes
import gc
import os
import re
import tempfile
from typing import Any

import torch

MAPPED_FROM = 1 << 16  # bytes: what is smaller comes from the heap, and is not seen
M_MMAP_THRESHOLD = -3


class Mallinfo2(ctypes.Structure):
    """As <malloc.h> has it; `hblkhd` is what is mapped now."""

    _fields_ = tuple((name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", *"abcde"))


class CudaPeak:
    """Since it was made, or since `restart`."""

    def __init__(self) -> None:
        self._most = 0
        self._reset = torch.cuda.reset_peak_memory_stats
        torch.cuda.reset_peak_memory_stats = self._listen  # type: ignore[assignment]
        self.restart()

    def restart(self) -> None:
        gc.collect()
        torch.cuda.synchronize()
        self._reset()
        self._most = 0

    def nbytes(self) -> int:
        torch.cuda.synchronize()
        return max(self._most, torch.cuda.max_memory_allocated())

    def _listen(self, device: Any = None) -> None:
        self._most = max(self._most, torch.cuda.max_memory_allocated(device))
        self._reset(device)


class MappedPeak:
    """Of the whole process, less what was mapped at `restart`. Make it before anything large is allocated: from then on all
    of that is mapped, where the library would sooner or later take it from a heap."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None)
        self._libc.mallinfo2.restype = Mallinfo2
        self._libc.mallopt(M_MMAP_THRESHOLD, MAPPED_FROM)
        self.restart()

    def restart(self) -> None:
        """The mark stays where it was: what comes must be larger than what was."""
        gc.collect()
        self._before, _ = self._mapped()

    def nbytes(self) -> int:
        return self._mapped()[1] - self._before

    def _mapped(self) -> tuple[int, int]:
        """Now, and at most. The library tells the latter to the error stream alone."""
        with tempfile.TemporaryFile("w+") as told:
            kept = os.dup(2)
            os.dup2(told.fileno(), 2)
            try:
                self._libc.malloc_stats()
            finally:
                os.dup2(kept, 2)
                os.close(kept)
            told.seek(0)
            return int(self._libc.mallinfo2().hblkhd), most_mapped(told.read())


def most_mapped(told: str) -> int:
    """Of what malloc_stats says."""
    found = re.search(r"^max mmap bytes\s*=\s*(\d+)$", told, re.MULTILINE)
    if found is None:
        raise RuntimeError(f"the C library says nothing of mapped bytes: {told!r}")
    return int(found[1])
