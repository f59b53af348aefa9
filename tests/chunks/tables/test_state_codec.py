"""Optimizer states in 8 bits: what the codes mean, how far they are off, and the kernel's bits beside torch's."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scrimp._cache import cache_folder
from scrimp.chunks.kernels.host_update import Native, host_kernel, takes_coded, why_no_host_kernel
from scrimp.chunks.store.placement import Piece
from scrimp.chunks.tables.optimizers import AdamW
from scrimp.chunks.tables.state_codec import BLOCK, Coder, coder_numel, state_fields
from scrimp.chunks.tables.table import ALIGN
from scrimp.chunks.update import update
from scrimp.chunks.update.update import TILE, Updater, stage_numel
from scrimp.errors import RunError
from tests.chunks.kernels.test_build import said, start
from tests.chunks.kernels.test_host_update import DTYPES, SPECIAL, bits, form, kernel, levels, weights_of

FIELDS = state_fields(2, "int8")
with_kernel = pytest.mark.skipif(host_kernel() is None, reason=f"no native kernel here: {why_no_host_kernel()}")

# What the codes stand for, relative to the scale: eight numbers to an octave, and 1 at the top.
ALL = [(1 + k / 8) * 2.0**e for e in range(-32, 0) for k in range(8)] + [1.0]
SQUARES, MAGNITUDES = ALL[-256:], [0.0, *ALL[-127:]]


def empty(numel: int) -> list[torch.Tensor]:
    return [torch.zeros(field.numel(numel), dtype=field.dtype) for field in FIELDS]


def coder(numel: int) -> Coder:
    return Coder(torch.full((coder_numel(numel),), float("nan")))  # what it does not set, it must not use


def encoded(first: torch.Tensor, second: torch.Tensor, count: int = 1, place: int = 0) -> list[torch.Tensor]:
    states, span, made = empty(first.numel()), slice(0, first.numel()), coder(first.numel())
    for schedule_step, values in zip(made.moments(span), (first, second), strict=True):
        schedule_step.copy_(values)
    made.encode(states, span, place=place, count=count)
    return states


def decoded(states: list[torch.Tensor]) -> list[torch.Tensor]:
    numel = states[0].numel()
    return [schedule_step.clone() for schedule_step in coder(numel).decode(states, slice(0, numel))]


def test_every_code_is_the_number_of_the_table() -> None:
    numel = 256
    states = empty(numel)
    states[0].copy_(torch.arange(-128, 128).clamp(min=-127))
    states[2].copy_(torch.arange(256))
    states[1].fill_(3.0)
    states[3].fill_(0.5)
    first, second = decoded(states)
    signed = [-MAGNITUDES[min(127, -k)] if k < 0 else MAGNITUDES[k] for k in range(-128, 128)]
    assert first.tolist() == [3.0 * x for x in signed]
    assert second.tolist() == [0.5 * x for x in SQUARES]


signs, exponents, mantissas = st.sampled_from([-1, 1]), st.integers(-60, 20), st.floats(1, 2)
numbers = st.just(0.0) | st.builds(lambda s, e, m: s * 2.0**e * m, signs, exponents, mantissas)


@given(values=st.lists(numbers, min_size=1, max_size=150), count=st.integers(1, 1 << 40), place=st.integers(0, 1 << 40))
def test_a_number_becomes_one_of_its_two_neighbours(values: list[float], count: int, place: int) -> None:
    first = torch.tensor(values)
    second = first.abs()
    for schedule_step, table, found in zip(
        (first, second), (MAGNITUDES, SQUARES), decoded(encoded(first, second, count, place)), strict=True
    ):
        for block, got in zip(schedule_step.split(BLOCK), found.split(BLOCK), strict=True):
            scale = float(block.abs().max())
            known = torch.tensor([x * scale for x in table], dtype=torch.float64)
            for want, have in zip(block.tolist(), got.tolist(), strict=True):
                if scale == 0:
                    assert have == 0
                    continue
                above = min(int(torch.searchsorted(known, abs(want) * (1 - 2**-22))), len(table) - 1)
                near = known[max(above - 1, 0) : above + 2]  # a product that is rounded may fall on the border's other side
                assert (near / abs(have) - 1).abs().min() < 1e-6 if have else near[0] == 0, (want, have, scale)
                assert have * want >= 0
                if abs(want) >= float(known[1]):
                    assert abs(have - want) <= abs(want) * 0.125 * (1 + 1e-6)
    if any(values):
        (second,) = decoded(encoded(first, second, count, place))[1:]
        assert all(
            bool((block > 0).all()) for block, had in zip(second.split(BLOCK), first.split(BLOCK), strict=True) if had.any()
        )


def test_the_mean_of_many_roundings_is_right() -> None:
    """Rounded to the nearest, most of these would be off by per cents, always to the same side."""
    random = torch.Generator().manual_seed(0)
    first = torch.randn(640, generator=random)
    second = first.square() * torch.rand(640, generator=random)
    sums = [torch.zeros(640, dtype=torch.float64) for _ in range(2)]
    times = 2000
    for count in range(1, times + 1):
        for total, schedule_step in zip(sums, decoded(encoded(first, second, count)), strict=True):
            total += schedule_step
    for total, want in zip(sums, (first, second), strict=True):
        off = total / times / want - 1
        assert off.abs().max() < 5 * 0.125 / 2 / times**0.5  # five standard deviations of the worst
        assert off.mean().abs() < 2e-4


def test_a_moment_that_drifts_less_than_its_last_bit_arrives() -> None:
    """From 0.01 towards 0.5 by a thousandth of the way a step; rounded to the nearest, it would not move at all."""
    numel, steps = 640, 1000
    second = torch.full((numel,), 0.01)
    second[::BLOCK] = 1.0  # what the scale is
    states, span, made = encoded(second, second), slice(0, numel), coder(numel)
    for count in range(2, steps + 2):
        for schedule_step in made.decode(states, span):
            schedule_step.mul_(0.999).add_(0.001 * 0.5)
            schedule_step[::BLOCK] = 1.0
        made.encode(states, span, place=0, count=count)
    for schedule_step in decoded(states):
        drifted = schedule_step[torch.arange(numel) % BLOCK != 0]
        assert float(drifted.mean()) == pytest.approx(0.5 - 0.49 * 0.999**steps, rel=0.03)


def test_places_and_updates_have_random_numbers_of_their_own() -> None:
    ones = torch.full((4096,), 1 / 3)
    ones[::BLOCK] = 1.0
    drawn = {(c, p): decoded(encoded(ones, ones, c, p)) for c, p in [(1, 0), (2, 0), (1, 64)]}
    upward = {key: [schedule_step > 1 / 3 for schedule_step in moments] for key, moments in drawn.items()}
    first, second = upward[1, 0]
    assert torch.equal(first[64:], upward[1, 64][0][:-64])  # the same element, in a piece that starts later
    for other in (second, upward[2, 0][0], first.roll(1), first.roll(64)):
        assert abs(float((first == other).double().mean()) - 0.556) < 0.05  # a third goes up: 1/9 + 4/9 agree by chance


def test_no_chunk_or_shard_cuts_a_block() -> None:
    assert ALIGN % BLOCK == 0
    assert TILE // update.CODED_SHARE % BLOCK == 0


def test_bytes_of_an_update_and_of_states() -> None:
    assert AdamW().update_nbytes == 28
    assert AdamW(state="int8").update_nbytes == 16.25
    assert sum(field.nbytes(640) for field in FIELDS) == 2 * (640 + 40)
    for bad in ("fp8", "", None):
        with pytest.raises(RunError, match="'fp32' and 'int8'"):
            AdamW(state=bad).fields  # noqa: B018


# The kernel and torch's tiles.


def updater(numel: int, kernel: Native | None) -> Updater:
    made = Updater(torch.device("cpu"), numel, state="int8")
    made.native = kernel
    return made


def piece_of(numel: int, dtype: torch.dtype, weight: torch.dtype | None, *, special: bool = False, place: int = 0) -> Piece:
    random = torch.Generator().manual_seed(numel)
    gradient, master = torch.randn(numel, generator=random).mul(1e-2).to(dtype), torch.randn(numel, generator=random)
    if special:
        picked = torch.tensor(SPECIAL)[torch.randint(len(SPECIAL), (numel,), generator=random)].to(dtype)
        gradient = torch.where(torch.rand(numel, generator=random) < 0.02, picked, gradient)
    own = master if weight is None else torch.empty(numel, dtype=weight)
    return Piece(inside=slice(place, place + numel), weight=own, gradient=gradient, master=master, states=empty(numel))


def compare(kernel: Native | None, numel: int, dtype: torch.dtype, weight: torch.dtype | None, *, special: bool = False) -> None:
    """Three updates, and every bit of what they leave."""
    mine = piece_of(numel, dtype, weight, special=special, place=6400)
    other = copy.deepcopy(mine)
    for count in (1, 2, 3):
        for piece, used in ((mine, kernel), (other, None)):
            updater(numel, used).apply(
                AdamW(lr=1e-2, state="int8"),
                0,
                count,
                piece,
                torch.tensor(0.5) if count == 2 else None,
                own_master=weight is None,
            )
    if form() is not None:  # on aarch64 torch reads an fp16 NaN with other bits; it makes its block NaN, whatever the codes are
        for codes, scales in ((0, 1), (2, 3)):
            nans = other.states[scales].isnan().repeat_interleave(BLOCK)[:numel]
            for piece in (mine, other):
                piece.states[codes][nans] = 0
    for name, got, want in (
        ("master", mine.master, other.master),
        ("weight", mine.weight, other.weight),
        *((str(k), mine.states[k], other.states[k]) for k in range(4)),
    ):
        same = torch.equal(bits(got), bits(want)) if got.is_floating_point() else torch.equal(got, want)
        assert same, (name, numel, dtype, weight)


@with_kernel
@pytest.mark.parametrize("level", levels())
def test_the_kernel_has_the_bits_of_torchs_tiles(level: int) -> None:
    sizes = [*range(1, 8), 61, 63, 64, 65, 127, 129, 200, 1000, 1023, 1025, TILE // update.CODED_SHARE + 77]
    for turn, numel in enumerate(sizes):
        dtype = DTYPES[turn % 3]
        for weight in weights_of(dtype):
            compare(kernel(level), numel, dtype, weight)
        compare(kernel(level), numel, dtype, weights_of(dtype)[-1], special=True)


OTHER = """
import tests.chunks.tables.test_state_codec as t
print(t.kernel().level)
for numel in (3, 61, 64, 4099):
    for dtype in t.DTYPES:
        for special in (False, True):
            t.compare(t.kernel(), numel, dtype, t.weights_of(dtype)[-1], special=special)
"""


@with_kernel
@pytest.mark.skipif(form() is not None, reason="this processor always has vectors")
def test_without_vectors_too() -> None:
    assert said(start(OTHER, cache_folder().parent, ATEN_CPU_CAPABILITY="default")) == "0"


@with_kernel
def test_threads_change_no_bit() -> None:
    numel = 200_003
    pieces = [piece_of(numel, torch.bfloat16, torch.bfloat16) for _ in range(2)]
    for piece, threads in zip(pieces, (1, 3), strict=True):
        for count in (1, 2):
            kernel().adamw_coded(
                piece.master, piece.states, piece.gradient, piece.weight, 0.5,
                lr=0.01, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1, count=count, place=0, threads=threads,
            )  # fmt: skip
    one, other = ([piece.master, piece.weight, *piece.states] for piece in pieces)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@with_kernel
def test_what_the_kernel_is_not_made_for() -> None:
    piece = piece_of(130, torch.bfloat16, torch.bfloat16)
    assert takes_coded(piece.master, piece.states, piece.gradient, piece.weight)
    for wrong in (
        replace(piece, states=piece.states[:3]),
        replace(piece, states=[piece.states[0].to(torch.uint8), *piece.states[1:]]),
        replace(piece, states=[*piece.states[:3], piece.states[3][:2]]),
        replace(piece, gradient=piece.gradient[:64]),
        replace(piece, states=[state.to("meta") for state in piece.states]),
    ):
        assert not takes_coded(wrong.master, wrong.states, wrong.gradient, wrong.weight)
        with pytest.raises(ValueError, match="codes and scales"):
            kernel().adamw_coded(
                wrong.master, wrong.states, wrong.gradient, wrong.weight, None,
                lr=0.01, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1, count=1, place=0, threads=1,
            )  # fmt: skip


def test_one_step_is_adamws_as_the_moments_stand() -> None:
    """The first update sees exact moments: masters are torch's, bit for bit. The second starts from what was kept."""
    piece = piece_of(1000, torch.float32, None)
    master = piece.master.clone()
    moments = [torch.zeros(1000), torch.zeros(1000)]
    for count in (1, 2):
        updater(1000, host_kernel()).apply(AdamW(lr=1e-2, state="int8"), 0, count, piece, None, own_master=True)
        torch._fused_adamw_(
            [master], [piece.gradient], [moments[0]], [moments[1]], [], [torch.tensor(float(count))],
            lr=1e-2, beta1=0.9, beta2=0.999, weight_decay=1e-2, eps=1e-8, amsgrad=False, maximize=False,
        )  # fmt: skip
        assert torch.equal(piece.master, master)
        for schedule_step, kept in zip(moments, decoded(piece.states), strict=True):
            assert (kept / schedule_step - 1).abs().max() <= 0.125
            schedule_step.copy_(kept)


def test_tiles_need_what_the_stage_has_and_nothing_else() -> None:
    """Two tiles and a bit, in a stage of exactly the promised size, without a storage of a tile's size besides."""
    numel = 2 * (TILE // update.CODED_SHARE) + 100
    made = updater(numel, None)
    assert made.stage.numel() == stage_numel(torch.device("cpu"), numel, None, "int8")
    piece = piece_of(numel, torch.bfloat16, torch.bfloat16)
    with torch.profiler.profile(profile_memory=True, acc_events=True) as profile:
        made.apply(AdamW(state="int8"), 0, 1, piece, torch.tensor(0.5), own_master=False)
    most = max(event.cpu_memory_usage for event in profile.events())
    assert most <= 4096, f"an operator made {most} bytes"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_codes_with_the_same_bits() -> None:
    """The codec alone: torch's fused update may differ there by an ulp."""
    numel = 100_001
    random = torch.Generator().manual_seed(0)
    first = torch.randn(numel, generator=random) * torch.randn(numel, generator=random).exp()
    here, span = encoded(first, first.square(), count=7, place=640), slice(0, numel)
    there = [state.cuda() for state in empty(numel)]
    made = Coder(torch.full((coder_numel(numel),), float("nan"), device="cuda"))
    for schedule_step, values in zip(made.moments(span), (first, first.square()), strict=True):
        schedule_step.copy_(values)
    made.encode(there, span, place=640, count=7)
    assert all(torch.equal(a, b.cpu()) for a, b in zip(here, there, strict=True))
    assert all(torch.equal(a, b.cpu()) for a, b in zip(decoded(here), made.decode(there, span), strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpus_update_takes_its_stage_and_no_more() -> None:
    numel = 3 * (update.CUDA_TILE // update.CODED_SHARE) + 100
    made = Updater(torch.device("cuda"), numel, state="int8")
    piece = piece_of(numel, torch.bfloat16, torch.bfloat16)
    states, on_host = [state.cuda() for state in piece.states], (piece.weight, piece.gradient, piece.master)
    weight, gradient, master = (tensor.cuda() for tensor in on_host)
    there = replace(piece, weight=weight, gradient=gradient, master=master, states=states)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    made.apply(AdamW(lr=1e-2, state="int8"), 0, 1, there, torch.tensor(0.5, device="cuda"), own_master=False)
    assert torch.cuda.max_memory_allocated() - before < 1 << 20
    updater(numel, host_kernel()).apply(AdamW(lr=1e-2, state="int8"), 0, 1, piece, torch.tensor(0.5), own_master=False)
    assert (there.master.cpu() - piece.master).abs().max() < 1e-6
    assert (there.states[0].cpu() != piece.states[0]).double().mean() < 1e-3
