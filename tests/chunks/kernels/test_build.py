"""Building the host's update kernel: cached, and never an exception where it cannot be built."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from scrimp.chunks.kernels import host_update
from scrimp.chunks.kernels.host_forms import Form
from scrimp.chunks.kernels.host_update import Native, host_kernel, why_no_host_kernel
from tests.chunks.kernels.test_host_update import form, kernel

pytestmark = pytest.mark.skipif(host_kernel() is None, reason=f"no native kernel here: {why_no_host_kernel()}")

ROOT = Path(__file__).parents[3]
SAY = """
from scrimp.chunks.kernels.host_update import host_kernel, why_no_host_kernel
k = host_kernel()
print(k.describe() if k else why_no_host_kernel())
"""
TRAIN = """
import torch
from scrimp import zoo
from scrimp.chunks.tables.optimizers import AdamW
from scrimp.engine import Engine, Memory
engine = Engine(zoo.build("gpt-tiny"), optimizer=AdamW(), memory=Memory(device="1GiB"), device="cpu", precision="bf16")
engine.step(*zoo.example_batch("gpt-tiny", batch=2, step=0))
"""


def start(code: str, cache: Path, **env: str) -> subprocess.Popen[str]:
    given = {**os.environ, "XDG_CACHE_HOME": str(cache), "OMP_NUM_THREADS": "1", **env}
    return subprocess.Popen([sys.executable, "-W", "error", "-c", code], cwd=ROOT, env=given, text=True, stdout=-1, stderr=-1)


def said(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return out.strip()


def settled(monkeypatch: pytest.MonkeyPatch, **env: str) -> str:
    """What a process with this environment would settle on."""
    with monkeypatch.context() as patch:
        for name, value in env.items():
            patch.setenv(name, value)
        found = host_update._settled.__wrapped__()
    return found.describe() if isinstance(found, Native) else found


@pytest.fixture
def copying(tmp_path: Path) -> str:
    """A compiler that takes no time: its library is the one that the machine's own compiler made of the same source."""
    script = tmp_path / "copying-cc"
    copy = f'while [ "$1" != -o ]; do shift; done; cp "{kernel().library._name}" "$2"'
    script.write_text(f'#!/bin/sh\ncase "$*" in *--version) exec cc --version;; esac\n{copy}\n')
    script.chmod(0o755)
    return str(script)


def kept(cache: Path) -> list[Path]:
    return sorted(path for path in cache.rglob("*") if path.is_file())


def test_training_without_a_compiler(tmp_path: Path) -> None:
    assert said(start(TRAIN + SAY, tmp_path, PATH="", CC="")) == "no C compiler (cc, gcc, clang)"
    assert not kept(tmp_path)


def test_broken_compilers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, broken = tmp_path / "cache", tmp_path / "broken-cc"
    env = {"XDG_CACHE_HOME": str(cache), "CC": f"{broken} -with -arguments"}
    assert settled(monkeypatch, **env) == f"no C compiler: CC is {broken}, which is not here"
    for script, reason in (
        ("exit 4", "broken-cc ended with 4 and said: nothing"),
        ('case "$*" in *--version) echo 1;; *) echo no such luck >&2; exit 3;; esac', "ended with 3 and said: no such luck"),
        ("exit 0", "OSError: "),  # what it leaves is no library
        ("\0", "broken-cc does not run: "),
    ):
        broken.write_text(f"#!/bin/sh\n{script}\n" if script != "\0" else "\0")
        broken.chmod(0o755)
        assert reason in settled(monkeypatch, **env)
        assert not kept(cache)


def test_a_kernel_with_other_bits_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = Form(lanes=16, body="second", tail="apart", nan="ones")  # no build of torch is like that
    monkeypatch.setattr(host_update, "_levels", lambda most: [wrong.level])
    assert settled(monkeypatch) == f"its bits are not those of torch {torch.__version__}"


def test_a_cache_that_cannot_be_written(tmp_path: Path, copying: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", copying)
    blocked = tmp_path / "file"
    blocked.write_text("")
    here = kernel().describe()
    assert settled(monkeypatch, XDG_CACHE_HOME=str(blocked)) == here
    assert settled(monkeypatch, XDG_CACHE_HOME="", HOME=str(blocked)) == here


def test_the_cache(tmp_path: Path, copying: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes that build at once leave one file; it is used again, and replaced if it is bad."""
    tmp_path = tmp_path / "cache"
    monkeypatch.setenv("CC", copying)
    racing = [start(SAY, tmp_path) for _ in range(2)]
    assert {said(process) for process in racing} == {kernel().describe()}
    (library,) = kept(tmp_path)
    assert library.parent == tmp_path / "scrimp"
    made = library.stat().st_mtime_ns
    assert settled(monkeypatch, XDG_CACHE_HOME=str(tmp_path)) == kernel().describe()
    assert library.stat().st_mtime_ns == made
    bad = tmp_path / "bad" / "scrimp" / library.name
    bad.parent.mkdir(parents=True)
    bad.write_bytes(b"")
    for _ in range(2):
        assert settled(monkeypatch, XDG_CACHE_HOME=str(tmp_path / "bad")) == kernel().describe()
    assert bad.stat().st_size


def test_switched_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert settled(monkeypatch, XDG_CACHE_HOME=str(tmp_path), SCRIMP_NATIVE="0") == "SCRIMP_NATIVE is 0"
    assert not kept(tmp_path)


OTHER = """
import tests.chunks.kernels.test_host_update as t
print(t.kernel().level)
for optimizer in t.OPTIMIZERS:
    for numel in (3, 61, 4099):
        for dtype in t.DTYPES:
            for weight in t.weights_of(dtype):
                for special in (False, True):
                    piece = t.piece_of(numel, optimizer.states, dtype, weight, special=special)
                    t.compare(t.updater(t.kernel()), optimizer, 3, piece, 0.3, (optimizer, numel, dtype, weight, special))
"""


@pytest.mark.skipif(form() is not None, reason="instruction sets of x86-64")
@pytest.mark.parametrize(("capability", "level"), [("default", 0), ("avx2", 1)])
def test_it_follows_torch_to_lesser_instructions(capability: str, level: int, tmp_path: Path) -> None:
    """torch without fused multiply-adds has other bits."""
    assert said(start(OTHER, tmp_path, ATEN_CPU_CAPABILITY=capability)) == str(min(level, kernel().library.scrimp_level()))


FORK = """
import os, warnings, tests.chunks.kernels.test_host_update as t
warnings.simplefilter("ignore")
t.test_threads_change_no_bit(2)
child = os.fork()
if child == 0:
    t.test_threads_change_no_bit(2)
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_after_a_fork(tmp_path: Path) -> None:
    """A child has none of its parent's threads."""
    assert said(start(FORK, tmp_path)) == "7"
