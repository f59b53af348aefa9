"""Direct I/O: a file past the page cache, which would take the very memory that a spill file is there to save."""

from __future__ import annotations

import mmap
import os

PAGE = 1 << 12  # what memory, place and length of a direct transfer are multiples of


def open_direct(fd: int) -> int:
    """An open file once more, for direct I/O; an OSError where its file system does not do that, found by trying: the
    file's first page is written and read."""
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
    """Let the page cache go of what was written or read without direct I/O."""
    os.posix_fadvise(fd, at, nbytes, os.POSIX_FADV_DONTNEED)
