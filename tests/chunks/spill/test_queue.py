"""How a spill file is read and written: whole pages past the cache, parts of regions, many requests at once."""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path

import pytest
import torch

from scrimp.chunks.spill.file import BLOCK, PAGE, SpillFile
from scrimp.chunks.spill.queue import SpillQueue, region_requests
from scrimp.chunks.transfer.host_arena import arena
from scrimp.errors import RunError
from tests.chunks.spill.test_file import same_bits


def test_whole_pages_go_past_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not a whole page, or not aligned in memory, does not; the bits are the same."""
    tensor = arena(BLOCK // 4 + PAGE // 4 + 5, torch.float32).normal_()
    file = SpillFile(tmp_path, {"a": tensor.nbytes, "b": tensor.nbytes}, "rank 0")
    if file.buffered_because:
        pytest.skip(file.buffered_because)
    used: list[tuple[int, int]] = []
    pwrite, preadv = os.pwrite, os.preadv

    def write(fd: int, data: memoryview, at: int) -> int:
        used.append((fd, len(data)))
        return pwrite(fd, data, at)

    def read(fd: int, views: list[memoryview], at: int) -> int:
        used.append((fd, len(views[0])))
        return preadv(fd, views, at)

    monkeypatch.setattr(os, "pwrite", write)
    monkeypatch.setattr(os, "preadv", read)
    got = arena(tensor.numel(), torch.float32)
    file.write("a", tensor)
    file.read("a", got)
    assert used == [(file._direct, BLOCK + PAGE), (file._fd, 20)] * 2
    assert same_bits(got, tensor)
    used.clear()
    shifted = torch.empty(tensor.numel() + 1)[1:].copy_(tensor)
    file.write("b", shifted)
    file.read("b", got)
    assert used[0] == (file._fd, shifted.nbytes)
    assert same_bits(got, tensor)
    file.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file._direct or -1)


def test_where_direct_io_is_refused_the_cache_is_let_go_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = os.open

    def refuse(path: str, flags: int, *args: object) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return opened(path, flags, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", refuse)
    tensor, calls = arena(BLOCK // 2 + 5, torch.float32).normal_(), []
    advise, sync = os.posix_fadvise, os.fdatasync
    monkeypatch.setattr(os, "posix_fadvise", lambda *args: (calls.append(args[1:]), advise(*args))[1])
    monkeypatch.setattr(os, "fdatasync", lambda fd: (calls.append("sync"), sync(fd))[1])
    file = SpillFile(tmp_path, {"before": 8, "a": tensor.nbytes}, "rank 0")
    assert file.buffered_because == f"{tmp_path} has no direct I/O: Invalid argument"
    file.write("a", tensor)
    got = arena(tensor.numel(), torch.float32)
    file.read("a", got)
    assert same_bits(got, tensor)
    gone = (PAGE, tensor.nbytes, os.POSIX_FADV_DONTNEED)
    assert calls == ["sync", gone, gone]

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fdatasync", full)
    with pytest.raises(RunError, match="could not be written: No space left on device"):
        file.write("a", tensor)
    file.close()


def test_parts(tmp_path: Path) -> None:
    tensor = arena(3 * BLOCK // 4 + 5, torch.float32).normal_()
    file = SpillFile(tmp_path, {"a": tensor.nbytes}, "rank 0")
    block = BLOCK // 4
    file.write("a", tensor[2 * block :], 2 * BLOCK)
    got = arena(tensor.numel(), torch.float32)
    with pytest.raises(RunError, match="holds nothing yet"):
        file.read("a", got)
    file.read("a", got[2 * block :], 2 * BLOCK)
    assert same_bits(got[2 * block :], tensor[2 * block :])
    file.write("a", tensor[: 2 * block])
    file.read("a", got)
    assert same_bits(got, tensor)
    for part, at in ((tensor[:block], 4), (tensor[: block - 1], 0), (tensor[:block], 3 * BLOCK)):
        with pytest.raises(RunError, match=rf"from byte {at}; regions are written and read as a whole, or in blocks"):
            file.write("a", part, at)
    os.pwrite(file._fd, b"?", 2 * BLOCK + 9)
    file.read("a", got[: 2 * block])
    with pytest.raises(RunError, match=r"region 'a', block 2 of 4, at byte 2097152 .* has the checksum"):
        file.read("a", got[block : 3 * block], BLOCK)
    assert got[block : 3 * block].isnan().all()
    file.close()


def test_many_requests_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch ends when all of it is over, and the first error is the batch's."""
    monkeypatch.setattr("scrimp.chunks.spill.queue.REQUEST", BLOCK)
    tensors = [arena(5 * BLOCK // 4 + k, torch.float32).normal_() for k in range(3)]
    file = SpillFile(tmp_path, {str(k): tensor.nbytes for k, tensor in enumerate(tensors)}, "rank 0")
    queue = SpillQueue()
    queue.run(region_requests(file, tensors, write=True))
    got = [arena(tensor.numel(), torch.float32) for tensor in tensors]
    queue.run(region_requests(file, got, write=False))
    assert all(map(same_bits, got, tensors))
    assert min(queue.read_rate, queue.write_rate) > 0
    os.pwrite(file._fd, b"?", 7 * BLOCK)
    with pytest.raises(RunError, match="region '1', block 2 of 6"):
        queue.run(region_requests(file, got, write=False))
    queue.run(region_requests(file, tensors, write=True))
    queue.run(region_requests(file, got, write=False))
    assert all(map(same_bits, got, tensors))
    queue.close()
    with pytest.raises(RunError, match="closed"):
        queue.run(region_requests(file, got, write=False))
    file.close()


def test_a_queue_that_is_closed_ends_what_it_is_doing_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scrimp.chunks.spill.queue.THREADS", 1)
    file = SpillFile(tmp_path, {"a": 4}, "rank 0")
    queue, began, done = SpillQueue(), threading.Event(), []
    monkeypatch.setattr(file, "write", lambda *_: (began.set(), time.sleep(0.2)))
    for k in range(3):
        queue.start(k, region_requests(file, [torch.ones(1)], write=True), lambda error, k=k: done.append((k, error)))
    assert began.wait(5)
    queue.close()
    assert done == [(0, None)]


def test_regions_with_blocks_of_their_own(tmp_path: Path) -> None:
    """Tiles of equal elements begin and end at blocks in both, whatever an element takes."""
    file = SpillFile(tmp_path, {"codes": 2500, "scales": 160}, "rank 0", {"codes": 1024, "scales": 64})
    codes, scales = torch.arange(2500).to(torch.uint8), torch.arange(40).float()
    for start in (2048, 0, 1024):
        parts = [codes[start : start + 1024], scales[start // 64 : start // 64 + 16]]
        for request in region_requests(file, parts, at=[start, start // 16], write=True):
            request.run()
    got = [torch.zeros_like(codes), torch.zeros_like(scales)]
    for request in region_requests(file, got, write=False):
        request.run()
    assert torch.equal(got[0], codes)
    assert torch.equal(got[1], scales)
    with pytest.raises(RunError, match="in blocks of 64"):
        file.write("scales", scales[:8], 0)
    os.pwrite(file._fd, b"?", PAGE + 70)
    with pytest.raises(RunError, match=rf"region 'scales', block 1 of 3, at byte {PAGE + 64} "):
        file.read("scales", got[1])
