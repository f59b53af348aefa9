"""The spill file: what was written comes back or it is an error, a full disk is found at once, and no file is ever left."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scrimp.chunks.spill.file import BLOCK, PAGE, SpillFile
from scrimp.errors import FitError, RunError

ROOT = Path(__file__).parents[3]
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
from scrimp.chunks.spill.file import SpillFile
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
    with pytest.raises(RunError, match=r"region 'a' was requested, but the spill file in .* is closed"):
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
from scrimp.chunks.spill.file import SpillFile
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
