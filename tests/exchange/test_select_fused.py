"""Sending and applying by the device's kernels: the bits of torch's way, in Triton's interpreter and on a GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from scrimp.exchange import _select_fused
from scrimp.exchange._bucket import plan_bucket
from scrimp.exchange._packet import pack, packet_nbytes, unpack
from scrimp.exchange._reduce import average_onto
from scrimp.exchange._row_topk import COLUMNS, RowTopK, row_topk
from scrimp.exchange._select import select_topk, take
from scrimp.exchange._select_fused import DTYPES, FusedExchange, device_selection, scratch_nbytes, why_no_device_selection
from tests.chunks.kernels.test_device_update import CPU, gpu
from tests.support.kernels import INTERPRETED, TRITON, no_waiting, run_interpreted

INF = float("inf")


def spread(numel: int, random: torch.Generator) -> torch.Tensor:
    """Of very different magnitudes, as gradients are."""
    return torch.randn(numel, generator=random) * torch.exp(3 * torch.randn(numel, generator=random))


def row_of(kind: str, numel: int, random: torch.Generator) -> torch.Tensor:
    values, drawn = spread(numel, random), torch.randint(0, numel, (max(1, numel // 50),), generator=random)
    if kind == "ties":
        return (2 * torch.randn(numel, generator=random)).round()
    if kind == "zeros":
        return torch.zeros(numel) * values.sign()  # of both signs
    if kind == "nearly zeros":
        return torch.zeros(numel).index_put((drawn,), values[drawn])
    if kind == "equal":
        return torch.full((numel,), -1.7) * values.sign()
    if kind == "infinities":
        return values.index_put((drawn,), INF * values[drawn].sign())
    if kind == "denormals":
        return values * 1e-44
    if kind == "huge":
        return (values.sign() * 3e38).index_put((drawn,), torch.tensor(torch.finfo(torch.float32).max))
    if kind == "neighbours":  # that differ in the last bits alone
        return (torch.randint(0x3F800000, 0x3F800400, (numel,), generator=random, dtype=torch.int32)).view(torch.float32)
    assert kind == "spread"
    return values


ROWS = ("spread", "ties", "zeros", "nearly zeros", "equal", "infinities", "denormals", "huge", "neighbours")


def rests(random: torch.Generator) -> Iterator[tuple[torch.Tensor, RowTopK]]:
    """Less than a row, of every kind and size, few entries and all."""
    for kind in ROWS:
        for numel in (1, 7, COLUMNS // 8, COLUMNS // 8 + 1, 20_001):
            for number in {1, max(1, numel // 100), numel // 2 + 1, numel}:
                yield row_of(kind, numel, random), RowTopK(numel=numel, per_row=number, from_rest=number)


def wholes(random: torch.Generator, kinds: Sequence[str] = ROWS) -> Iterator[tuple[torch.Tensor, RowTopK]]:
    """Rows of different kinds together, and a rest."""
    for rest, density in ((0, 0.01), (999, 0.001), (8192, 1.0)):
        rows = [row_of(kind, COLUMNS, random) for kind in kinds]
        yield torch.cat([*rows, spread(rest, random)]), row_topk(len(rows) * COLUMNS + rest, density)


def first_largest(values: torch.Tensor, how: RowTopK) -> torch.Tensor:
    """By a stable sort of every row: of equal magnitudes the first. In ascending order."""
    found = []
    for start in range(0, how.numel, COLUMNS):
        number = how.per_row if start + COLUMNS <= how.numel else how.from_rest
        order = values[start : start + COLUMNS].abs().sort(descending=True, stable=True).indices
        found.append(order[:number].sort().values + start)
    return torch.cat(found)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu().view(torch.uint8)


def assert_sends(kernel: FusedExchange, before: torch.Tensor, how: RowTopK, dtype: torch.dtype, device: torch.device) -> None:
    """Entries, what stays, the momentum and the packet's bytes, all but those between its parts."""
    want, values = before.clone(), before.to(device, copy=True)
    positions = first_largest(want, how)
    sent = take(want, positions, dtype)
    other = torch.full((packet_nbytes(how, dtype),), 255, dtype=torch.uint8)
    pack(other, how, positions, sent)
    momentum = torch.arange(1.0, how.numel + 1)
    mine_momentum = momentum.to(device, copy=True)
    momentum[positions] = 0
    packet = torch.full_like(other, 255).to(device)
    kernel.send(values, how, packet, dtype, mine_momentum)
    assert torch.equal(unpack(packet.cpu(), how, dtype)[0], positions)
    assert torch.equal(bits(packet), other)
    assert torch.equal(bits(values), bits(want))
    assert torch.equal(mine_momentum.cpu(), momentum)


def assert_same_as_select(kernel: FusedExchange, dtype: torch.dtype, device: torch.device) -> None:
    """Where no two magnitudes are equal, torch's way finds the same."""
    random = torch.Generator().manual_seed(5)
    how = row_topk(2 * COLUMNS + 5001, 0.01)
    values = (1 + torch.randperm(how.numel, generator=random)) * 1e-3 * torch.randn(how.numel, generator=random).sign()
    packet = torch.empty(packet_nbytes(how, dtype), dtype=torch.uint8, device=device)
    mine = values.to(device, copy=True)
    kernel.send(mine, how, packet, dtype)
    positions = select_topk(values, how).sort().values
    sent = take(values, positions, dtype)
    found, got = unpack(packet.cpu(), how, dtype)
    assert torch.equal(found, positions)
    assert torch.equal(bits(got), bits(sent))
    assert torch.equal(bits(mine), bits(values))


def assert_applies(kernel: FusedExchange, world: int, dtype: torch.dtype, device: torch.device) -> None:
    """The mean of some ranks' packets, of two parameters, against torch's way; then a place that is wrong."""
    bucket = plan_bucket([("one", COLUMNS + 5003), ("two", 5000)], 0.03, dtype)
    rows = torch.zeros(world, bucket.nbytes, dtype=torch.uint8)
    for rank in range(world):
        for part in bucket.parts:
            values = spread(part.numel, torch.Generator().manual_seed(rank))
            positions = select_topk(values, part.how)
            pack(rows[rank, part.start : part.stop], part.how, positions, take(values, positions, dtype))
    means = {part.name: torch.zeros(part.numel) for part in bucket.parts}
    assert average_onto(rows, bucket, lambda part: means[part.name]) is None
    wrong = torch.zeros(len(bucket.parts), world, dtype=torch.int32, device=device)

    def apply() -> list[torch.Tensor]:
        mine = [torch.zeros(part.numel, device=device) for part in bucket.parts]
        weights = [each.to(dtype) for each in mine]
        for rank, row in enumerate(rows.to(device)):
            for index, part in enumerate(bucket.parts):
                packet = row[part.start : part.stop]
                kernel.apply(packet, part.how, dtype, mine[index], 1 / world, wrong[index, rank], weight=weights[index])
        for master, weight in zip(mine, weights, strict=True):
            cut_off = 0.0 if device.type == "cuda" else 2**-7  # the interpreter does not round to bf16
            torch.testing.assert_close(weight, master.to(dtype), rtol=cut_off, atol=0)
        return mine

    for part, mine in zip(bucket.parts, apply(), strict=True):
        assert torch.equal(bits(mine), bits(means[part.name]))
    assert not wrong.any()
    last = bucket.parts[1]
    rows[world - 1, last.start : last.start + 2].view(torch.int16)[0] = 5000
    means["two"].zero_()
    assert "beyond" in str(average_onto(rows, bucket, lambda part: means[part.name]))
    apply()
    assert wrong.tolist() == [[0] * world, [0] * (world - 1) + [1]]


def assert_accumulates(kernel: FusedExchange, numel: int, dtype: torch.dtype, device: torch.device, *, momentum: bool) -> None:
    """Three micro-batches, of which the last is the whole; against torch on the same device."""
    random = torch.Generator().manual_seed(numel)
    u, v = spread(numel, random).to(device), spread(numel, random).to(device)
    mine_u, mine_v = (u.clone() if momentum else None), v.clone()
    for turn in range(3):
        gradient = spread(numel, random).to(dtype).to(device)
        sound = None if turn == 0 else torch.tensor(turn == 2, device=device)  # the second is not
        poisoned = gradient if turn != 1 else gradient * float("nan")
        kernel.accumulate(poisoned, mine_u, mine_v, carry=0.9 if turn == 0 else 1.0, whole=turn == 2, rate=0.5, sound=sound)
        if turn == 0:
            u.mul_(0.9)
        gradient = gradient if turn != 1 else torch.zeros_like(gradient)
        u.add_(gradient)
        if not momentum:
            v.add_(gradient.float(), alpha=0.5)
    if mine_u is not None:
        assert torch.equal(bits(mine_u), bits(u))
        v.add_(u, alpha=0.5)
    assert torch.equal(bits(mine_v), bits(v))


# Without a GPU.


def test_without_cuda_torch_is_used_and_the_reason_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert device_selection(CPU, torch.bfloat16) is None
    assert why_no_device_selection(CPU, torch.bfloat16) == "it is for CUDA devices"
    monkeypatch.setenv("SCRIMP_FUSED", "0")
    _select_fused._settled.cache_clear()
    assert why_no_device_selection(CPU, torch.bfloat16) == "SCRIMP_FUSED is 0"
    _select_fused._settled.cache_clear()


def test_what_does_not_load_or_compile_is_a_reason_not_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", 0)

    def fails(error: Exception) -> Any:
        def raising(*_: Any) -> Any:
            raise error

        return raising

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    for error, reason in (
        (ImportError("no module named triton"), "no Triton: no module named triton"),
        (RuntimeError("ptxas said no"), "RuntimeError: ptxas said no"),
    ):
        _select_fused._settled.cache_clear()
        monkeypatch.setattr(_select_fused, "_kernels", fails(error))
        assert device_selection(device, torch.bfloat16) is None
        assert why_no_device_selection(device, torch.bfloat16) == reason
    _select_fused._settled.cache_clear()
    monkeypatch.setattr(_select_fused, "_kernels", lambda: None)
    monkeypatch.setattr(_select_fused, "_tried", lambda *_: False)
    assert str(why_no_device_selection(device, torch.bfloat16)).startswith("its bits are not those of torch")
    _select_fused._settled.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    assert why_no_device_selection(device, torch.bfloat16) == "it is for devices of capability 8.0 or more"
    _select_fused._settled.cache_clear()


def test_wrong_tensors_are_refused() -> None:
    how, kernel = row_topk(64, 0.1), FusedExchange(None)
    packet, good = torch.zeros(packet_nbytes(how, torch.bfloat16), dtype=torch.uint8), torch.zeros(64)
    for values, row, masked in (
        (good.double(), packet, None),
        (torch.zeros(63), packet, None),
        (torch.zeros(128)[::2], packet, None),
        (good, packet[:-1], None),
        (good, packet, torch.zeros(64).half()),
    ):
        with pytest.raises(ValueError, match="contiguous"):
            kernel.send(values, how, row, torch.bfloat16, masked)
    with pytest.raises(ValueError, match="contiguous"):
        kernel.apply(packet, how, torch.bfloat16, good, 1.0, torch.zeros(1))
    with pytest.raises(ValueError, match="contiguous"):
        kernel.accumulate(torch.zeros(63), None, good, carry=0.9, whole=True)


def test_the_scratch_is_small() -> None:
    assert scratch_nbytes(100 * COLUMNS) < 4 * 100 * COLUMNS / 15


@pytest.mark.skipif(INTERPRETED or not TRITON, reason="no Triton, or it interprets already")
def test_the_kernels_in_tritons_interpreter() -> None:
    run_interpreted(__file__)


@pytest.mark.skipif(not INTERPRETED, reason="Triton does not interpret here")
class TestInterpreted:
    def test_interpreted_they_send_as_torch_does(self) -> None:
        kernel = FusedExchange(_select_fused._kernels())
        random = torch.Generator().manual_seed(0)
        few = [*rests(random)][::9]  # the interpreter is slow
        for number, (values, how) in enumerate([*few, next(wholes(random, ("spread", "ties", "nearly zeros")))]):
            assert_sends(kernel, values, how, DTYPES[number % 3], CPU)
        assert_same_as_select(kernel, torch.bfloat16, CPU)

    def test_interpreted_they_apply_as_torch_does(self) -> None:
        kernel = FusedExchange(_select_fused._kernels())
        for world, dtype in zip((1, 3, 4), DTYPES, strict=True):
            assert_applies(kernel, world, dtype, CPU)

    def test_interpreted_they_accumulate_as_torch_does(self) -> None:
        """A rate of a half: the interpreter has no fused multiply-add."""
        kernel = FusedExchange(_select_fused._kernels())
        for numel, dtype in zip((7, 1024, 3333), DTYPES, strict=True):
            for momentum in (False, True):
                assert_accumulates(kernel, numel, dtype, CPU, momentum=momentum)

    def test_interpreted_the_trial_passes_and_sees_what_is_wrong(self, monkeypatch: pytest.MonkeyPatch) -> None:
        kernel = FusedExchange(_select_fused._kernels())
        assert _select_fused._tried(kernel, CPU, torch.bfloat16)
        for name, change in (("send", lambda *given: given[2][:1].add_(1)), ("apply", lambda *given: given[3][-1:].add_(1))):
            right = getattr(FusedExchange, name)

            def changed(*given: Any, right: Any = right, change: Any = change, **named: Any) -> None:
                right(*given, **named)
                change(*given[1:])

            with monkeypatch.context() as patch:
                patch.setattr(FusedExchange, name, changed)
                assert not _select_fused._tried(kernel, CPU, torch.bfloat16)


# On a GPU.


class TestOnAGpu:
    pytestmark = gpu

    @pytest.fixture(name="device")
    def _device(self) -> torch.device:
        return torch.device("cuda", torch.cuda.current_device())

    @pytest.fixture(name="kernel", params=DTYPES)
    def _kernel(self, device: torch.device, request: pytest.FixtureRequest) -> tuple[FusedExchange, torch.dtype]:
        found = device_selection(device, request.param)
        if found is None and not TRITON:
            pytest.skip("no Triton")
        assert found is not None, why_no_device_selection(device, request.param)
        return found, request.param

    def test_they_send_as_torch_does(self, kernel: tuple[FusedExchange, torch.dtype], device: torch.device) -> None:
        random = torch.Generator().manual_seed(0)
        for values, how in (*rests(random), *wholes(random)):
            assert_sends(kernel[0], values, how, kernel[1], device)
        assert_same_as_select(*kernel, device)

    def test_they_apply_as_torch_does(self, kernel: tuple[FusedExchange, torch.dtype], device: torch.device) -> None:
        for world in (1, 3, 4):
            assert_applies(kernel[0], world, kernel[1], device)

    def test_they_accumulate_as_torch_does(self, kernel: tuple[FusedExchange, torch.dtype], device: torch.device) -> None:
        for numel in (1, 7, 1024, 1_000_003):
            for momentum in (False, True):
                assert_accumulates(kernel[0], numel, kernel[1], device, momentum=momentum)

    def test_a_large_one(self, kernel: tuple[FusedExchange, torch.dtype], device: torch.device) -> None:
        numel = 100 * COLUMNS + 333
        assert_sends(kernel[0], spread(numel, torch.Generator().manual_seed(0)), row_topk(numel, 0.01), kernel[1], device)

    def test_nothing_waits_for_the_device(self, kernel: tuple[FusedExchange, torch.dtype], device: torch.device) -> None:
        how = row_topk(3 * COLUMNS + 5, 0.01)
        values, momentum = torch.randn(how.numel, device=device), torch.zeros(how.numel, device=device)
        packet = torch.empty(packet_nbytes(how, kernel[1]), dtype=torch.uint8, device=device)
        wrong = torch.zeros(1, dtype=torch.int32, device=device)
        with no_waiting():
            kernel[0].accumulate(values, momentum, values, carry=0.9, whole=True)
            kernel[0].send(values, how, packet, kernel[1], momentum)
            kernel[0].apply(packet, how, kernel[1], values, 0.25, wrong)
