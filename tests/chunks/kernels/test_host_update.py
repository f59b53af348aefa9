"""The host's update kernel: bit for bit as torch's."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from scrimp import zoo
from scrimp.chunks.kernels.host_forms import Form, form_of
from scrimp.chunks.kernels.host_update import Native, host_kernel, takes, why_no_host_kernel
from scrimp.chunks.store.placement import Piece
from scrimp.chunks.tables.optimizers import SGD, AdamW, Optimizer
from scrimp.chunks.update import update
from scrimp.chunks.update.update import TILE, Updater
from scrimp.engine import Engine, Memory
from tests.support.kernels import OPTIMIZERS

pytestmark = pytest.mark.skipif(host_kernel() is None, reason=f"no native kernel here: {why_no_host_kernel()}")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
COUNTS = (1, 2, 77, 100_001)
SPECIAL = [
    0.0,
    -0.0,
    float("inf"),
    -float("inf"),
    float("nan"),
    1e-45,
    -1e-45,
    1e-39,
    6e-8,
    -3e-8,
    1e-30,
    3e38,
    -3e38,
    65504.0,
    1.0,
]


def kernel(level: int | None = None) -> Native:
    found = host_kernel()
    assert found is not None
    return found if level is None else replace(found, level=level)


def form() -> Form | None:
    """The form of the kernel; None where it is one for an instruction set of x86-64."""
    found = host_kernel()
    return None if found is None else form_of(found.level)


def levels() -> list[int]:
    found = host_kernel()
    if found is None:
        return []
    return [found.level] if form() else [*range(1, found.level + 1)] or [0]


def updater(kernel: Native | None) -> Updater:
    made = Updater(torch.device("cpu"), 1 << 62)
    made.native = kernel
    return made


def piece_of(
    numel: int, states: int, dtype: torch.dtype, weight: torch.dtype | None, *, special: bool = False, seed: int = 0
) -> Piece:
    """`weight`: its dtype, the same memory as the gradient if it is also the gradient's; None where it is the master."""
    random = torch.Generator().manual_seed(1000 * numel + seed)

    def draw(scale: float) -> torch.Tensor:
        drawn = torch.randn(numel, generator=random) * scale
        if special:
            picked = torch.tensor(SPECIAL)[torch.randint(len(SPECIAL), (numel,), generator=random)]
            drawn = torch.where(torch.rand(numel, generator=random) < 0.4, picked, drawn)
        return drawn

    gradient, master = draw(1e-2).to(dtype), draw(1.0)
    kept = [draw(1e-2), draw(1e-3).square()][:states]
    own = master if weight is None else gradient if weight == dtype else torch.empty(numel, dtype=weight)
    return Piece(inside=slice(0, numel), weight=own, gradient=gradient, master=master, states=kept)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """NaNs are one value here: their sign and payload depend on the order of operands, which the compiler chooses, in torch
    too. bf16 has one NaN only, and its bits are compared; unless torch keeps an fp32 NaN's upper bits, as with SVE."""
    found = form()
    if tensor.dtype == torch.bfloat16 and (found is None or found.nan != "kept"):
        return tensor.view(torch.int16)
    whole: torch.Tensor = torch.where(tensor.isnan(), torch.full_like(tensor, float("nan")), tensor)
    return whole.view(torch.int32 if tensor.dtype == torch.float32 else torch.int16)


def assert_same(got: Piece, want: Piece, what: object) -> None:
    for name, mine, other in (
        ("master", got.master, want.master),
        ("weight", got.weight, want.weight),
        *(("state", mine, other) for mine, other in zip(got.states, want.states, strict=True)),
    ):
        wrong = (bits(mine) != bits(other)).nonzero().flatten().tolist()
        assert not wrong, f"{what}: {name} differs at {wrong[:5]} of {mine.numel()}: {mine[wrong[:5]]}, torch {other[wrong[:5]]}"


def compare(mine: Updater, optimizer: Optimizer, count: int, piece: Piece, scale: float | None, what: object) -> None:
    own_master = piece.weight is piece.master
    twin = copy.deepcopy(piece)
    factor = None if scale is None else torch.tensor(scale)
    mine.apply(optimizer, 0, count, piece, factor, own_master=own_master)
    updater(None).apply(optimizer, 0, count, twin, factor, own_master=own_master)
    assert_same(piece, twin, what)


def weights_of(dtype: torch.dtype) -> tuple[torch.dtype | None, ...]:
    return (None, torch.bfloat16, torch.float16) if dtype == torch.float32 else (None, dtype)


@pytest.mark.parametrize("level", levels())
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_length_has_torchs_bits(optimizer: Optimizer, level: int) -> None:
    mine, turn = updater(kernel(level)), 0
    for numel in range(201):
        for dtype in DTYPES:
            for weight in weights_of(dtype):
                turn += 1
                scale, count = (None, 0.37, 1 / 65536)[turn % 3], COUNTS[turn // 3 % 4]
                piece = piece_of(numel, optimizer.states, dtype, weight)
                compare(mine, optimizer, count, piece, scale, (numel, dtype, weight, scale, count))


@pytest.mark.parametrize("level", levels())
@pytest.mark.parametrize("numel", [1000, TILE - 1, TILE, TILE + 1, 3 * TILE + 4321, 1_234_567])
def test_long_ones_have_torchs_bits(numel: int, level: int) -> None:
    mine = updater(kernel(level))
    for turn, optimizer in enumerate(OPTIMIZERS):
        dtype = DTYPES[turn % 3]
        for count in (1, 1000):
            piece = piece_of(numel, optimizer.states, dtype, weights_of(dtype)[-1])
            compare(mine, optimizer, count, piece, 0.7 if turn % 2 else None, (optimizer, dtype, count))


@pytest.mark.parametrize("level", levels())
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_special_values(optimizer: Optimizer, level: int) -> None:
    mine = updater(kernel(level))
    for numel in (1, 7, 8, 61, 4099):
        for dtype in DTYPES:
            for weight in weights_of(dtype):
                for count in (1, 5):
                    piece = piece_of(numel, optimizer.states, dtype, weight, special=True, seed=count)
                    compare(mine, optimizer, count, piece, (None, 0.37)[numel % 2], (numel, dtype, weight, count))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_gradient_is_read_right(dtype: torch.dtype) -> None:
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(dtype)
    for shift in (0, 1, 2, 3, 4, 5, 6, 7):  # each of them comes by the last few, too
        for part in (
            every.split((1 << 16) - 8) if shift == 0 else [torch.cat([every[k : k + shift] for k in range(0, 999, shift)])]
        ):
            piece = replace(piece_of(part.numel(), 0, dtype, None), gradient=part)
            compare(updater(kernel()), SGD(lr=1.0), 1, piece, None, (dtype, shift))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("last", [False, True])
def test_weights_are_rounded_as_torch_rounds(dtype: torch.dtype, last: bool) -> None:
    """Borders between two 16-bit numbers and their neighbours, written by vectors or one by one."""
    lower = torch.arange(0, 1 << 15, 5, dtype=torch.int16).view(dtype).float()
    lower = lower[lower.isfinite()]
    half = torch.nextafter(lower.to(dtype), torch.full_like(lower, float("inf")).to(dtype)).float().add(lower).div(2)
    near = torch.cat([half, torch.nextafter(half, lower), torch.nextafter(half, half + 1), torch.tensor(SPECIAL)])
    near = torch.cat([near, -near])
    pieces = near.split(7) if last else [near[: near.numel() // 16 * 16]]
    for master in pieces[:: 10 if last else 1]:
        piece = piece_of(master.numel(), 0, torch.float32, dtype)
        piece.gradient.zero_()
        piece.master.copy_(master)
        compare(updater(kernel()), SGD(lr=0.0), 1, piece, None, (dtype, last))


@pytest.mark.parametrize("threads", [2, 3, 16])
def test_threads_change_no_bit(threads: int) -> None:
    for numel in (5, 65536, 65537, 1_000_003):
        pieces = [piece_of(numel, 2, torch.bfloat16, torch.bfloat16) for _ in range(2)]
        for piece, used in zip(pieces, (1, threads), strict=True):
            for count in (1, 2):
                kernel().adamw(
                    piece.master, *piece.states, piece.gradient, piece.weight, 0.5,
                    lr=0.01, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1, count=count, threads=used,
                )  # fmt: skip
        assert_same(*pieces, numel)


@pytest.fixture
def torch_threads() -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield 2
    torch.set_num_threads(before)


def test_torch_with_threads_has_the_same_bits(torch_threads: int) -> None:
    """One call on the whole tensor, cut by torch as it likes; the last few are the last of all."""
    for numel in (40_003, 1_000_005):
        mine, whole = (piece_of(numel, 2, torch.float32, None) for _ in range(2))
        updater(kernel()).apply(AdamW(lr=0.01), 0, 3, mine, None, own_master=True)
        torch._fused_adamw_(
            [whole.master], [whole.gradient], [whole.states[0]], [whole.states[1]], [], [torch.tensor(3.0)],
            lr=0.01, beta1=0.9, beta2=0.999, weight_decay=0.01, eps=1e-8, amsgrad=False, maximize=False,
        )  # fmt: skip
        assert_same(mine, whole, numel)


def test_unused_buffer_and_first_step() -> None:
    piece = piece_of(100, 1, torch.float32, None)
    before = piece.states[0].clone()
    compare(updater(kernel()), SGD(lr=0.1), 1, piece, None, "a buffer that another group needs")
    assert torch.equal(piece.states[0], before)
    piece.states[0].fill_(float("nan"))  # a first step does not read it
    compare(updater(kernel()), SGD(lr=0.1, momentum=0.9, nesterov=True), 1, piece, None, "first")
    assert piece.states[0].isfinite().all()


def test_what_it_is_not_made_for() -> None:
    one, two = torch.zeros(8), torch.zeros(8)
    assert takes(one, [two], one.bfloat16(), one.bfloat16())
    assert not takes(one, [two.double()], one, None)
    assert not takes(one, [two], one.double(), None)
    assert not takes(one, [two[:4]], one, None)
    assert not takes(one, [torch.zeros(16)[::2]], one, None)
    assert not takes(one, [two], one, one)
    assert not takes(one, [two.to("meta")], one, None)
    with pytest.raises(ValueError, match="contiguous"):
        kernel().sgd(
            one.double(), None, one, None, None,
            lr=0.1, momentum=0, dampening=0, weight_decay=0, nesterov=False, count=1, threads=1,
        )  # fmt: skip
    with pytest.raises(ValueError, match="no buffer"):
        kernel().sgd(
            one, None, one, None, None,
            lr=0.1, momentum=0.9, dampening=0, weight_decay=0, nesterov=False, count=1, threads=1,
        )  # fmt: skip


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_an_engine_with_and_without_it(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def trained() -> tuple[list[float], dict[str, torch.Tensor]]:
        torch.manual_seed(0)
        engine = Engine(
            zoo.build("gpt-tiny"), optimizer=AdamW(lr=3e-3), memory=Memory(device="1GiB"), device="cpu",
            precision=precision, clip_norm=0.5,
        )  # fmt: skip
        losses = [float(engine.step(*zoo.example_batch("gpt-tiny", batch=4, step=step))) for step in range(5)]
        return losses, engine.state_dict()

    losses, state = trained()
    monkeypatch.setattr(update, "host_kernel", lambda: None)
    plain_losses, plain = trained()
    assert losses == plain_losses
    assert all(torch.equal(state[name], plain[name]) for name in plain)


def test_many_callers_at_once() -> None:
    with ThreadPoolExecutor(4) as callers:
        for done in [callers.submit(test_threads_change_no_bit, threads) for threads in (2, 3, 2, 4)]:
            done.result()
