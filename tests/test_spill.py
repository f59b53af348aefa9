"""The spill file: what was written comes back or it is an error, a full disk is found at once, and no file is ever left."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scrimp.chunks._arena import arena
from scrimp.chunks._spill import BLOCK, PAGE, SpillFile
from scrimp.chunks._spill_queue import SpillQueue, requests
from scrimp.errors import FitError, RunError

ROOT = Path(__file__).parent.parent
DTYPES = [torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.complex64]


def draw(nbytes: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    bits = torch.randint(0, 2 if dtype is torch.bool else 256, (nbytes,), dtype=torch.uint8, generator=torch.manual_seed(seed))
    return bits.view(dtype)


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.equal(left.view(torch.uint8), right.view(torch.uint8))


@contextmanager
def at_most(nbytes: int) -> Iterator[None]:
    """No file of this process may grow beyond this; Python ignores the signal that goes with it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("nbytes", [0, 8, PAGE - 8, PAGE, PAGE + 8, BLOCK - 8, BLOCK, BLOCK + 8, 3 * BLOCK + 16])
def test_round_trip(tmp_path: Path, dtype: torch.dtype, nbytes: int) -> None:
    file = SpillFile(tmp_path, {"a": nbytes, "b": nbytes, "c": 8}, "rank 0")
    first, second, third = draw(nbytes, dtype, 1), draw(nbytes, dtype, 2), draw(8, dtype, 3)
    for key, tensor in [("b", second), ("a", second), ("c", third), ("a", first)]:
        file.write(key, tensor)
    for key, tensor in [("a", first), ("b", second), ("c", third)]:
        got = torch.zeros_like(tensor)
        file.read(key, got)
        assert same_bits(got, tensor)
    file.close()


@given(st.lists(st.sampled_from([0, 1, 7, PAGE - 1, PAGE, PAGE + 1, BLOCK - 1, BLOCK + 1]), max_size=5), st.randoms())
def test_regions_do_not_touch_each_other(tmp_path_factory: pytest.TempPathFactory, sizes: list[int], order: object) -> None:
    file = SpillFile(tmp_path_factory.getbasetemp(), {str(k): size for k, size in enumerate(sizes)}, "rank 0")
    tensors = {str(k): draw(size, torch.uint8, k) for k, size in enumerate(sizes)}
    keys = list(tensors)
    order.shuffle(keys)  # type: ignore[attr-defined]
    for key in keys:
        file.write(key, tensors[key])
    for key, tensor in tensors.items():
        got = torch.empty_like(tensor)
        file.read(key, got)
        assert torch.equal(got, tensor)
    file.close()


def test_scalars_and_shapes_and_what_requires_a_gradient(tmp_path: Path) -> None:
    file = SpillFile(tmp_path, {"scalar": 4, "cube": 4 * 24}, "rank 0")
    for key, tensor in [("scalar", torch.tensor(2.5)), ("cube", torch.randn(2, 3, 4, requires_grad=True))]:
        file.write(key, tensor)
        got = torch.zeros_like(tensor)
        file.read(key, got)
        assert torch.equal(got, tensor)
    file.close()


def test_short_writes_and_reads_are_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite, preadv = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: pwrite(fd, data[:99_991], at))
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: preadv(fd, [views[0][:77_777]], at))
    tensor = draw(2 * BLOCK + 4, torch.float32)
    file = SpillFile(tmp_path, {"a": tensor.nbytes}, "rank 0")
    file.write("a", tensor)
    got = torch.empty_like(tensor)
    file.read("a", got)
    assert same_bits(got, tensor)
    file.close()


@pytest.mark.parametrize(("at", "block"), [(0, 0), (BLOCK - 1, 0), (BLOCK, 1), (2 * BLOCK + 3, 2)])
def test_a_flipped_bit_is_found(tmp_path: Path, at: int, block: int) -> None:
    file = SpillFile(tmp_path, {"before": 100, "blocks.3": 2 * BLOCK + 4}, "rank 2, master")
    tensor = torch.ones(BLOCK // 2 + 1)
    file.write("blocks.3", tensor)
    position = PAGE + at
    (byte,) = os.pread(file._fd, 1, position)
    os.pwrite(file._fd, bytes([byte ^ 16]), position)
    got = torch.zeros_like(tensor)
    words = rf"rank 2, master: region 'blocks\.3', block {block} of 3, at byte {PAGE + block * BLOCK} .* has the checksum .* was"
    with pytest.raises(RunError, match=words) as caught:
        file.read("blocks.3", got)
    assert "the spill file was changed or the disk is failing; load the last checkpoint" in str(caught.value)
    assert str(tmp_path) in str(caught.value)
    assert got.isnan().all()
    with pytest.raises(RunError, match="holds nothing yet"):
        file.read("blocks.3", got)
    file.write("blocks.3", tensor)
    file.read("blocks.3", got)
    assert torch.equal(got, tensor)
    file.close()


def test_a_truncated_file_is_found(tmp_path: Path) -> None:
    file = SpillFile(tmp_path, {"a": 2 * BLOCK}, "rank 0")
    tensor = torch.ones(BLOCK // 2)
    file.write("a", tensor)
    os.ftruncate(file._fd, BLOCK + 1000)
    with pytest.raises(RunError, match=rf"block 1 of 2.* has 1000 of its {BLOCK} bytes: .* load the last checkpoint"):
        file.read("a", tensor)
    assert tensor.isnan().all()
    file.close()


def test_a_disk_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = SpillFile(tmp_path, {"a": BLOCK + 4}, "rank 0")
    tensor = torch.ones(BLOCK // 4 + 1)
    file.write("a", tensor)

    def fail(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", fail)
        with pytest.raises(RunError, match=r"block 0 of 2.*could not be read: Input/output error") as caught:
            file.read("a", torch.empty_like(tensor))
    assert isinstance(caught.value.__cause__, OSError)
    file.write("a", tensor)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", fail)
        with pytest.raises(RunError, match=r"block 0 of 2.*could not be written: Input/output error\. .* are free in") as caught:
            file.write("a", tensor)
    assert isinstance(caught.value.__cause__, OSError)
    with pytest.raises(RunError, match=r"region 'a' .* holds nothing yet"):
        file.read("a", tensor)
    file.close()


def test_a_write_that_finds_no_room(tmp_path: Path) -> None:
    file = SpillFile(tmp_path, {"a": 4 * BLOCK}, "rank 0")
    with at_most(2 * BLOCK), pytest.raises(RunError, match=r"block 2 of 4.*could not be written: File too large"):
        file.write("a", torch.ones(BLOCK))
    with pytest.raises(RunError, match="holds nothing yet"):
        file.read("a", torch.ones(BLOCK))
    file.close()


def test_no_room_at_construction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "deep" / "spill"
    words = (
        r"rank 1: no room for a spill file of 3\.0 MiB \(3145728 bytes\): (.*)\. .* are free in .*spill\. Make room there, give"
    )
    with at_most(BLOCK), pytest.raises(FitError, match=words):
        SpillFile(folder, {"a": 2 * BLOCK, "b": BLOCK - 5}, "rank 1")

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(FitError, match=words) as caught:
        SpillFile(folder, {"a": 3 * BLOCK}, "rank 1")
    assert "No space left on device" in str(caught.value)
    assert not list(folder.iterdir())


def test_a_file_system_that_is_really_full(tmp_path: Path) -> None:
    """A tmpfs of 1 MiB in a mount namespace of its own, which goes with the process."""
    code = f"""
import pathlib, torch
from scrimp.chunks._spill import SpillFile
from scrimp.errors import FitError
folder = pathlib.Path({str(tmp_path)!r})
SpillFile(folder, {{"a": 1 << 19}}, "rank 0").write("a", torch.ones(1 << 17))
try:
    SpillFile(folder, {{"a": 2 << 20}}, "rank 0")
except FitError as error:
    print(error)
"""
    names = ["unshare", "--map-root-user", "--mount", "--"]
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)]
    if not _can([*names, *mount]):
        pytest.skip("mounting a tmpfs is not allowed here")
    both = ["sh", "-c", '"$0" "$@" && exec "$PY" -c "$CODE"', *mount]
    environment = {**os.environ, "PY": sys.executable, "CODE": code}
    done = subprocess.run([*names, *both], capture_output=True, text=True, cwd=ROOT, env=environment, check=True)
    assert "no room for a spill file of 2.0 MiB (2097152 bytes): No space left on device. " in done.stdout
    assert "1.0 MiB are free in" in done.stdout


def _can(command: list[str]) -> bool:
    try:
        return subprocess.run(command, capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


def test_a_folder_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(RunError, match=r"rank 0: a spill file of 1\.0 MiB cannot be made in .*taken: .*Memory\(disk="):
        SpillFile(tmp_path / "taken", {"a": BLOCK}, "rank 0")


@pytest.mark.parametrize(
    ("key", "tensor", "words"),
    [
        ("b", torch.ones(4), "no region 'b'; it has 1, such as a"),
        ("a", torch.ones(3), r"region 'a' has 16 bytes, a tensor of shape \(3,\) and torch.float32 has 12"),
        ("a", torch.ones(2, 2).T, r"contiguous tensors on the CPU, not one on cpu of shape \(2, 2\) and strides \(1, 2\)"),
        ("a", torch.ones(4, device="meta"), "not one on meta"),
    ],
)
def test_what_is_refused_and_why(tmp_path: Path, key: str, tensor: torch.Tensor, words: str) -> None:
    file = SpillFile(tmp_path, {"a": 16}, "rank 0")
    for call in (file.write, file.read):
        with pytest.raises(RunError, match=words):
            call(key, tensor)
    file.close()
    with pytest.raises(RunError, match=r"region 'a' was asked for, but the spill file in .* is closed"):
        file.write("a", torch.ones(4))


def test_the_space_is_reserved_and_the_file_has_no_name(tmp_path: Path) -> None:
    file = SpillFile(tmp_path / "new", {"a": BLOCK, "b": 1}, "rank 0")
    assert os.fstat(file._fd).st_blocks * 512 >= file.nbytes == BLOCK + PAGE
    assert not list((tmp_path / "new").iterdir())
    file.close()
    file.close()
    assert not list((tmp_path / "new").iterdir())


def test_nothing_is_left_after_a_kill(tmp_path: Path) -> None:
    code = f"""
import pathlib, time, torch
from scrimp.chunks._spill import SpillFile
file = SpillFile(pathlib.Path({str(tmp_path)!r}), {{"a": 1 << 20}}, "rank 0")
file.write("a", torch.ones(1 << 18))
print("ready", flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        child.send_signal(signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL
    assert not list(tmp_path.iterdir())


def test_a_file_that_is_let_go_is_closed(tmp_path: Path) -> None:
    file = SpillFile(tmp_path, {"a": 16}, "rank 0")
    fd = file._fd
    del file
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


# Direct I/O, parts, and several threads.


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
    monkeypatch.setattr("scrimp.chunks._spill_queue.REQUEST", BLOCK)
    tensors = [arena(5 * BLOCK // 4 + k, torch.float32).normal_() for k in range(3)]
    file = SpillFile(tmp_path, {str(k): tensor.nbytes for k, tensor in enumerate(tensors)}, "rank 0")
    queue = SpillQueue()
    queue.run(requests(file, tensors, write=True))
    got = [arena(tensor.numel(), torch.float32) for tensor in tensors]
    queue.run(requests(file, got, write=False))
    assert all(map(same_bits, got, tensors))
    assert min(queue.read_rate, queue.write_rate) > 0
    os.pwrite(file._fd, b"?", 7 * BLOCK)
    with pytest.raises(RunError, match="region '1', block 2 of 6"):
        queue.run(requests(file, got, write=False))
    queue.run(requests(file, tensors, write=True))
    queue.run(requests(file, got, write=False))
    assert all(map(same_bits, got, tensors))
    queue.close()
    with pytest.raises(RunError, match="closed"):
        queue.run(requests(file, got, write=False))
    file.close()


def test_a_queue_that_is_closed_ends_what_it_is_doing_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scrimp.chunks._spill_queue.THREADS", 1)
    file = SpillFile(tmp_path, {"a": 4}, "rank 0")
    queue, began, done = SpillQueue(), threading.Event(), []
    monkeypatch.setattr(file, "write", lambda *_: (began.set(), time.sleep(0.2)))
    for k in range(3):
        queue.start(k, requests(file, [torch.ones(1)], write=True), lambda error, k=k: done.append((k, error)))
    assert began.wait(5)
    queue.close()
    assert done == [(0, None)]


def test_regions_with_blocks_of_their_own(tmp_path: Path) -> None:
    """Tiles of equal elements begin and end at blocks in both, whatever an element takes."""
    file = SpillFile(tmp_path, {"codes": 2500, "scales": 160}, "rank 0", {"codes": 1024, "scales": 64})
    codes, scales = torch.arange(2500).to(torch.uint8), torch.arange(40).float()
    for start in (2048, 0, 1024):
        parts = [codes[start : start + 1024], scales[start // 64 : start // 64 + 16]]
        for request in requests(file, parts, at=[start, start // 16], write=True):
            request.run()
    got = [torch.zeros_like(codes), torch.zeros_like(scales)]
    for request in requests(file, got, write=False):
        request.run()
    assert torch.equal(got[0], codes)
    assert torch.equal(got[1], scales)
    with pytest.raises(RunError, match="in blocks of 64"):
        file.write("scales", scales[:8], 0)
    os.pwrite(file._fd, b"?", PAGE + 70)
    with pytest.raises(RunError, match=rf"region 'scales', block 1 of 3, at byte {PAGE + 64} "):
        file.read("scales", got[1])
