"""The device's update of states of 8 bits: the bits of the codec around the kernel for fp32 states, in Triton's interpreter and
on a GPU; there within one ulp of torch's tiles too, but for codes that this ulp turns."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from scrimp import zoo
from scrimp.chunks.kernels import device_update
from scrimp.chunks.kernels.device_update import BLOCK, Fused, Kind, nearly_all, update_kinds, within_an_ulp
from scrimp.chunks.store.placement import Piece
from scrimp.chunks.tables.optimizers import AdamW
from scrimp.chunks.tables.state_codec import BLOCK as CODED
from scrimp.chunks.tables.state_codec import Coder, coder_numel, state_fields
from scrimp.chunks.update.update import Updater, stage_numel
from scrimp.engine import Engine, Memory
from tests.chunks.kernels.test_device_update import CPU, DTYPES, gpu
from tests.support.kernels import INTERPRETED, TRITON, no_waiting, on_the_gpu, run_interpreted

OPTIMIZERS = (
    AdamW(lr=1e-3, state="int8"),
    AdamW(lr=3e-2, betas=(0.4, 0.95), eps=1e-4, weight_decay=0.3, state="int8"),
    AdamW(lr=0.1, betas=(0.0, 0.0), weight_decay=0.0, state="int8"),
)
SIZES = (1, CODED - 1, CODED, CODED + 1, BLOCK, BLOCK + 1, 2 * BLOCK + CODED, 3 * BLOCK + 333)
NAMES = ("master", "weight", "codes", "scales", "codes of squares", "scales of squares")


def gradient_of(numel: int, dtype: torch.dtype, device: torch.device, seed: int) -> torch.Tensor:
    """Blocks of all magnitudes, down to where squares and moments vanish, and some that are 0."""
    random = torch.Generator().manual_seed(numel + 1000 * seed)
    blocks = -(-numel // CODED)
    powers = torch.randint(-25, 4, (blocks, 1), generator=random, dtype=torch.float32)
    values = torch.randn(blocks, CODED, generator=random) * 10**powers * (torch.rand(blocks, 1, generator=random) < 0.9)
    return values.flatten()[:numel].to(dtype).to(device)


def piece_of(numel: int, dtype: torch.dtype, device: torch.device, *, aliased: bool, place: int = 0) -> Piece:
    """`aliased`: gradient and weight are one memory, as in a home without gradients of its own."""
    random = torch.Generator().manual_seed(numel)
    master, gradient = torch.randn(numel, generator=random).to(device), gradient_of(numel, dtype, device, 0)
    weight = master if dtype == torch.float32 else gradient if aliased else torch.empty_like(gradient)
    states = [torch.zeros(field.numel(numel), dtype=field.dtype, device=device) for field in state_fields(2, "int8")]
    return Piece(inside=slice(place, place + numel), weight=weight, gradient=gradient, master=master, states=states)


def apply(updater: Updater, optimizer: AdamW, count: int, piece: Piece, scale: torch.Tensor | None) -> None:
    updater.native = None
    updater.apply(optimizer, 0, count, piece, scale, own_master=piece.weight is piece.master)


def by_kernel(kernel: Fused, optimizer: AdamW, count: int, piece: Piece, scale: torch.Tensor | None) -> None:
    apply(Updater(piece.master.device, piece.master.numel(), kernel, "int8"), optimizer, count, piece, scale)


def by_parts(kernel: Fused, optimizer: AdamW, count: int, piece: Piece, scale: torch.Tensor | None) -> None:
    """Decoded by torch, updated by the kernel for fp32 states, encoded by torch."""
    numel = piece.master.numel()
    coder, span = Coder(torch.empty(coder_numel(numel), device=piece.master.device)), slice(0, numel)
    plain = Piece(**{**vars(piece), "states": coder.decode(piece.states, span)})
    apply(Updater(piece.master.device, numel, kernel), AdamW(**{**vars(optimizer), "state": "fp32"}), count, plain, scale)
    coder.encode(piece.states, span, place=piece.inside.start, count=count)


def parts_of(piece: Piece) -> list[torch.Tensor]:
    return [piece.master, piece.weight, *piece.states]


def assert_bits(mine: Piece, other: Piece, words: str) -> None:
    for name, got, want in zip(NAMES, parts_of(mine), parts_of(other), strict=True):
        assert torch.equal(got.view(torch.uint8), want.view(torch.uint8)), f"{name}, {words}"


def compare(kernel: Fused, optimizer: AdamW, sizes: tuple[int, ...], device: torch.device) -> None:
    """Some updates one after the other, and every bit of what they leave."""
    for turn, numel in enumerate(sizes):
        for dtype in DTYPES:
            scale = None if turn % 2 else torch.tensor(0.37, device=device)
            mine = piece_of(numel, dtype, device, aliased=turn % 3 > 0, place=CODED * turn)
            other = copy.deepcopy(mine)
            for count in (1, 2, 50):
                for piece, update in ((mine, by_kernel), (other, by_parts)):
                    piece.gradient.copy_(gradient_of(numel, dtype, device, count))
                    update(kernel, optimizer, count, piece, scale)
                assert_bits(mine, other, f"{numel}, {dtype}, {count}")
            if numel > BLOCK:
                assert bool(mine.states[0].any())
                assert len(mine.states[2].unique()) > 8


# Without a GPU.


def test_with_the_kernel_no_stage_is_needed() -> None:
    assert stage_numel(torch.device("cuda"), 1000, None, "int8") > 5000
    assert stage_numel(torch.device("cuda"), 1000, Fused(None), "int8") == 0
    assert Updater(CPU, 1000, Fused(None), "int8").stage.nbytes == 0


def test_it_is_compiled_apart() -> None:
    found = update_kinds([AdamW(), AdamW(lr=2.0, state="int8"), AdamW(state="int8")], [torch.bfloat16])
    assert found == {Kind(dtype=torch.bfloat16, adamw=True), Kind(dtype=torch.bfloat16, adamw=True, coded=True)}


def test_wrong_tensors_are_refused() -> None:
    piece = piece_of(64, torch.bfloat16, CPU, aliased=True)
    plain = [torch.zeros(64), torch.zeros(64)]
    for states in (plain, piece.states[:3], [*piece.states[:3], torch.zeros(2)], [*piece.states[:3], torch.zeros(1).half()]):
        changed = Piece(**{**vars(piece), "states": states})
        with pytest.raises(ValueError, match="states as the optimizer keeps them"):
            Fused(None).apply(OPTIMIZERS[0], 0.1, 1, changed, changed.weight, None)
    with pytest.raises(ValueError, match="states as the optimizer keeps them"):
        Fused(None).apply(AdamW(), 0.1, 1, piece, piece.weight, None)


def test_codes_that_an_ulp_turns() -> None:
    codes = torch.arange(1024).to(torch.uint8)
    near, far, many = codes.clone(), codes.clone(), codes.clone()
    near[500] += 1
    far[500] += 2
    many[:16] += 1
    assert nearly_all(codes, codes)
    assert nearly_all(near, codes)
    assert not nearly_all(far, codes)
    assert not nearly_all(many, codes)


@pytest.mark.skipif(INTERPRETED or not TRITON, reason="no Triton, or it interprets already")
def test_the_kernel_in_tritons_interpreter() -> None:
    run_interpreted(__file__)


@pytest.mark.skipif(not INTERPRETED, reason="Triton does not interpret here")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_interpreted_it_codes_as_torch_does(optimizer: AdamW) -> None:
    compare(Fused(device_update._kernels()), optimizer, SIZES, CPU)


# On a GPU.


@pytest.fixture(name="kernel")
def _kernel() -> Fused:
    return on_the_gpu(update_kinds([*OPTIMIZERS, AdamW()], DTYPES))


class TestOnAGpu:
    pytestmark = gpu

    @pytest.mark.parametrize("optimizer", OPTIMIZERS)
    def test_it_codes_as_torch_does(self, kernel: Fused, optimizer: AdamW) -> None:
        compare(kernel, optimizer, (*SIZES, 1_000_003), torch.device("cuda", torch.cuda.current_device()))

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_every_update_is_near_that_of_torchs_tiles(self, kernel: Fused, dtype: torch.dtype) -> None:
        device, numel = torch.device("cuda", torch.cuda.current_device()), 1_000_003
        tiles = Updater(device, numel, state="int8")
        piece = piece_of(numel, dtype, device, aliased=True, place=CODED)
        for count in (1, 2, 3, 77):
            piece.gradient.copy_(gradient_of(numel, dtype, device, count))
            mine = copy.deepcopy(piece)
            by_kernel(kernel, OPTIMIZERS[0], count, mine, None)
            apply(tiles, OPTIMIZERS[0], count, piece, None)
            torch.testing.assert_close(mine.master, piece.master, rtol=2**-22, atol=1e-9)  # a master may nearly vanish
            for got, want in zip(mine.states, piece.states, strict=True):
                if got.is_floating_point():
                    assert within_an_ulp(got, want)
                    continue
                separate = (got.int() - want.int()).abs()
                assert int(separate.max()) <= 1
                assert int(separate.sum()) <= 1e-4 * numel, f"{int(separate.sum())} of {numel} codes differ"

    def test_new_places_and_counts_do_not_compile_anew(self, kernel: Fused, monkeypatch: pytest.MonkeyPatch) -> None:
        import triton

        def compiles(*_: Any, **__: Any) -> Any:
            raise AssertionError("compiled again")

        device = torch.device("cuda", torch.cuda.current_device())
        monkeypatch.setattr(triton.compiler, "compile", compiles)
        monkeypatch.setattr(triton.runtime.jit.JITFunction, "_do_compile", compiles, raising=False)
        whole = piece_of(5000, torch.bfloat16, device, aliased=True)
        for count, start in enumerate((0, 1, 2, 16, 33), start=1):  # scales begin anywhere, codes at a block
            span = slice(CODED * start, 5000)
            cut = [state[field.span(span)] for state, field in zip(whole.states, state_fields(2, "int8"), strict=True)]
            weight = whole.weight[span]
            piece = Piece(inside=span, weight=weight, gradient=weight, master=whole.master[span], states=cut)
            by_kernel(kernel, AdamW(lr=0.1 * count, state="int8"), count, piece, torch.ones((), device=device))

    def test_nothing_waits_for_the_device(self, kernel: Fused) -> None:
        device = torch.device("cuda", torch.cuda.current_device())
        piece, scale = piece_of(5000, torch.bfloat16, device, aliased=True), torch.ones((), device=device)
        with no_waiting():
            for count in (1, 2, 3):
                by_kernel(kernel, OPTIMIZERS[0], count, piece, scale)

    def test_an_engine_with_it(self, kernel: Fused, monkeypatch: pytest.MonkeyPatch) -> None:
        """No stage, and losses like those with torch's tiles."""
        losses = {}
        for used in (kernel, None):
            monkeypatch.setattr("scrimp.engine.update.update.device_kernel", lambda *_, used=used: used)
            torch.manual_seed(0)
            optimizer = AdamW(lr=1e-3, state="int8")
            engine = Engine(
                zoo.build("gpt-tiny"), optimizer=optimizer, memory=Memory(device="2GiB"), device="cuda", clip_norm=1.0
            )
            losses[used is None] = [float(engine.step(*zoo.example_batch("gpt-tiny", batch=4, step=step))) for step in range(12)]
            assert {placement.tier for placement in engine._run.store.placements if placement.weights.numel()} == {"device"}
            assert (engine._run.updating.stage_nbytes == 0) == (used is not None)
            engine.close()
        assert losses[False] == pytest.approx(losses[True], rel=1e-2)
        assert losses[False][-1] < losses[False][0]
