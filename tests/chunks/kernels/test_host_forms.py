"""The host kernels' plain C: its forms, the trial that picks one, and aarch64, by a cross compiler and emulation."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from scrimp.chunks.kernels import build, host_trial
from scrimp.chunks.kernels.build import FLAGS, NoKernelError
from scrimp.chunks.kernels.host_forms import FORMS, Form, form_of
from scrimp.chunks.kernels.host_update import LEVELS, _levels, host_kernel
from scrimp.chunks.tables.optimizers import Optimizer
from scrimp.exchange import _native_select
from tests.chunks.kernels.test_host_update import DTYPES, compare, kernel, piece_of, updater, weights_of
from tests.support.kernels import OPTIMIZERS

CROSS, EMULATOR = shutil.which("aarch64-linux-gnu-gcc"), shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
CHECK = Path(__file__).parents[2] / "support" / "native_check.c"
SOURCES = (build.SOURCE, _native_select.SOURCE)
AARCH64 = 183  # in an ELF header

with_kernel = pytest.mark.skipif(host_kernel() is None, reason="no native kernel here")
on_x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="for the forms of torch on x86-64")


def torchs_form() -> Form:
    """Of torch's kernels on x86-64."""
    if kernel().level == 0:
        return Form(lanes=8, body="apart", tail="apart", nan="quiet")
    return Form(lanes=8, body="second", tail="first", nan="ones")


def test_a_form_and_its_level() -> None:
    assert len({form.level for form in FORMS}) == len(FORMS)
    assert all(form_of(form.level) == form for form in FORMS)
    assert all(form_of(level) is None for level in range(len(LEVELS)))


def test_which_levels_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """On aarch64 (level 3) every form; on x86-64 what the processor can do, and torch uses."""
    assert _levels(3) == [form.level for form in FORMS]
    for capability, tried in {"DEFAULT": 0, "AVX2": 1, "AVX512": 2}.items():
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda found=capability: found)
        assert _levels(2) == [tried]


@with_kernel
def test_the_trial_tells_all_forms_apart() -> None:
    """So what it picks is torch's form, and no other."""
    before, made = host_trial.trial().before, set()
    for form in FORMS:
        mine = kernel(form.level)
        results = [
            result
            for (count, beta1), drawn in zip(host_trial.ROUNDS, before, strict=True)
            for given in zip(*drawn, strict=True)
            for result in host_trial.updated(mine, given, count, beta1)
        ]
        weights = host_trial.rounded(mine)[1].view(torch.int16)
        made.add(b"".join(tensor.numpy().tobytes() for tensor in (*results, weights)))
    assert len(made) == len(FORMS)


@with_kernel
@on_x86
def test_the_trial_finds_torchs_form_among_all() -> None:
    trial = host_trial.trial()
    assert [form for form in FORMS if trial.passed_by(kernel(form.level))] == [torchs_form()]


@with_kernel
@on_x86
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_plain_c_has_torchs_bits(optimizer: Optimizer) -> None:
    mine = updater(kernel(torchs_form().level))
    for turn, numel in enumerate((*range(20), 31, 64, 1023, 1024, 1031, 4099)):
        dtype = DTYPES[turn % 3]
        for weight in weights_of(dtype):
            for special in (False, True):
                piece = piece_of(numel, optimizer.states, dtype, weight, special=special)
                compare(mine, optimizer, (1, 5)[turn % 2], piece, (None, 0.37)[turn // 2 % 2], (numel, dtype, weight, special))


def test_other_processors_use_torchs_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    with pytest.raises(NoKernelError, match=r"^it is for x86-64 and aarch64, this is riscv64$"):
        build.load_library()


def built(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def check_program(compiler: str, folder: Path) -> Path:
    """The kernels with a reference that does one element at a time."""
    flags = [flag for flag in FLAGS if flag not in ("-shared", "-fPIC")]
    program = folder / "check"
    built([compiler, *flags, "-static", str(CHECK), str(build.SOURCE), "-o", str(program), "-lm"])
    return program


def agreed(said: str) -> int:
    number, *words = said.split()
    assert words == ["numbers", "agree"], said
    return int(number)


@with_kernel
def test_plain_c_against_one_element_at_a_time(tmp_path: Path) -> None:
    assert agreed(built([str(check_program(build.compiler()[0], tmp_path))])) > 100_000


@pytest.mark.skipif(CROSS is None, reason="no aarch64-linux-gnu-gcc (Debian: gcc-aarch64-linux-gnu)")
@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)
def test_it_compiles_for_aarch64(source: Path, tmp_path: Path) -> None:
    assert CROSS is not None
    library = tmp_path / "kernel.so"
    built([CROSS, *FLAGS, "-Wall", "-Wextra", "-Werror", str(source), "-o", str(library), "-lm"])
    assert int.from_bytes(library.read_bytes()[18:20], "little") == AARCH64


@pytest.mark.skipif(CROSS is None or EMULATOR is None, reason="no cross compiler or no qemu-aarch64 (Debian: qemu-user)")
def test_plain_c_on_aarch64_against_one_element_at_a_time(tmp_path: Path) -> None:
    assert CROSS is not None
    assert EMULATOR is not None
    assert agreed(built([EMULATOR, str(check_program(CROSS, tmp_path))])) > 100_000
