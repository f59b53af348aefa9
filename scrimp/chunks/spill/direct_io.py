"""Direct I/O: bypasses the page cache, which would take the memory that a spill file is meant to save."""

from __future__ import annotations

import mmap
import os

PAGE = 1 << 12  # address, offset and length of a direct transfer are multiples of this


def open_direct(fd: int) -> int:
    """Reopens an open file for direct I/O. Raises OSError if its file system does not support it, which is tested by writing
    and reading the file's first page."""
    again = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_DIRECT)
    try:
        with mmap.mmap(-1, PAGE) as page:
            if os.pwrite(again, page, 0) != PAGE or os.preadv(again, [page], 0) != PAGE:
                raise OSError(0, "a page was not transferred as a whole")
    except BaseException:
        os.close(again)
        raise
    return again


def forget(fd: int, at: int, nbytes: int) -> None:
    """Drops pages from the cache that were written or read without direct I/O."""
    os.posix_fadvise(fd, at, nbytes, os.POSIX_FADV_DONTNEED)
