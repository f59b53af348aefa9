"""The host's kernel for sparse exchange: exactly the largest, nothing lost, and what torch's way gives."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scrimp.chunks.kernels.host_update import FUSED
from scrimp.exchange import _error_feedback, _native_select, _select
from scrimp.exchange._error_feedback import Adaptive, ErrorFeedback, Momentum, Rule
from scrimp.exchange._native_select import NativeSelect, Numbers, host_selection, takes, why_no_host_selection
from scrimp.exchange._packet import pack, packet_nbytes, unpack
from scrimp.exchange._residual import residual
from scrimp.exchange._row_topk import COLUMNS, RowTopK, row_topk
from scrimp.exchange._select import select_by_torch, select_topk, take

pytestmark = pytest.mark.skipif(host_selection() is None, reason=f"no native kernel here: {why_no_host_selection()}")

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
RULES: list[tuple[Rule, int]] = [
    (Momentum(momentum=0.0), 0),
    (Momentum(momentum=0.9), 1),
    (Adaptive(betas=(0.9, 0.999), eps=1e-8), 2),
    (Adaptive(betas=(0.3, 0.9), eps=1e-6), 2),
]
SIZES = st.one_of(st.integers(1, 200), st.integers(COLUMNS - 2, COLUMNS + 2), st.integers(1, 3 * COLUMNS))
DENSITIES = st.sampled_from([1e-9, 0.001, 0.01, 0.3, 0.999])
LOOKS = ("spread", "normal", "few numbers", "all equal", "zeros", "nearly zeros", "denormal", "huge", "infinite", "one bin")


def kernel(level: int | None = None) -> NativeSelect:
    found = host_selection()
    assert found is not None
    return found if level is None else replace(found, level=level)


def levels() -> list[int]:
    found = host_selection()
    if found is None:
        return []
    return [*range(found.level + 1 if found.level != FUSED else 1), FUSED]


def drawn(numel: int, look: str, seed: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    normal = torch.randn(numel, generator=random)
    if look == "infinite":
        return torch.where(torch.rand(numel, generator=random) < 0.02, normal.sign() * torch.inf, normal)
    if look == "one bin":  # that differ in their lowest bits only
        return (normal.sign() + 1e-7 * torch.randint(0, 9, (numel,), generator=random)).float()
    looks = {
        "spread": normal * torch.exp(3 * torch.randn(numel, generator=random)),
        "normal": normal,
        "few numbers": (2 * normal).round(),
        "all equal": normal.sign() * 0.3,
        "zeros": normal * 0.0,  # of both signs
        "nearly zeros": torch.where(torch.rand(numel, generator=random) < 0.005, normal, 0.0),
        "denormal": normal * 1e-41,
        "huge": normal * 1e38,
    }
    return looks[look]


def largest(values: torch.Tensor, how: RowTopK) -> torch.Tensor:
    """By sorting: of equal ones the first, in ascending order."""
    found = []
    for start in range(0, how.numel, COLUMNS):
        row = values[start : start + COLUMNS].abs()
        wanted = how.per_row if row.numel() == COLUMNS else how.from_rest
        found.append(row.sort(descending=True, stable=True).indices[:wanted].sort().values + start)
    return torch.cat(found)


@given(SIZES, DENSITIES, st.sampled_from(LOOKS), st.sampled_from(levels()), st.integers(0, 5))
def test_exactly_the_largest_are_found(numel: int, density: float, look: str, level: int, seed: int) -> None:
    values, how = drawn(numel, look, seed), row_topk(numel, density)
    before = values.clone()
    assert torch.equal(kernel(level).select(values, how), largest(values, how))
    assert torch.equal(values, before)


def test_what_is_no_number_is_largest_as_in_torch() -> None:
    values = torch.randn(3000)
    values[[5, 700, 2999]] = torch.tensor([torch.nan, -torch.nan, torch.inf])
    how = RowTopK(numel=3000, per_row=0, from_rest=3)
    assert kernel().select(values, how).tolist() == select_by_torch(values, how).sort().values.tolist() == [5, 700, 2999]


def test_whole_rows() -> None:
    for how in (RowTopK(numel=COLUMNS, per_row=COLUMNS, from_rest=0), RowTopK(numel=COLUMNS + 9, per_row=COLUMNS, from_rest=9)):
        for level in levels():
            assert torch.equal(kernel(level).select(torch.randn(how.numel), how), torch.arange(how.numel))


def test_each_number_of_entries_of_a_short_row() -> None:
    values = drawn(131, "few numbers", 0)
    for wanted in range(1, 132):
        how = RowTopK(numel=131, per_row=0, from_rest=wanted)
        for level in levels():
            assert torch.equal(kernel(level).select(values, how), largest(values, how))


def by_the_rule(
    rule: Rule, states: list[torch.Tensor], gradient: torch.Tensor, rest: torch.Tensor, lr: float, count: int
) -> torch.Tensor:
    """The residual before anything is sent, as torch has it."""
    rule.carry(states)
    rule.add(states, gradient)
    rule.adds(states, rest, lr, count)
    return rest if states else rest.add_(gradient, alpha=lr)


@given(
    SIZES, DENSITIES, st.sampled_from(LOOKS), st.sampled_from(RULES), st.sampled_from(DTYPES), st.sampled_from(DTYPES),
    st.booleans(), st.sampled_from(levels()), st.integers(1, 3),
)  # fmt: skip
def test_a_step_against_torch(
    numel: int, density: float, look: str, rule: tuple[Rule, int], incoming: torch.dtype, dtype: torch.dtype, masking: bool,
    level: int, count: int,
) -> None:  # fmt: skip
    """What torch makes of gradient, states and residual; then what is there is exactly what is sent and what stays, it is the
    largest that are sent, rounded, and these are masked."""
    how, lr = row_topk(numel, density), 0.37
    gradient = drawn(numel, "normal", 1).to(incoming)
    states, rest = [drawn(numel, "normal", 2), drawn(numel, "normal", 3).square()][: rule[1]], drawn(numel, look, 4)
    theirs = [state.clone() for state in states]
    wanted = by_the_rule(rule[0], theirs, gradient.float(), rest.clone(), lr, count)
    # Of signed numbers little may be left, and then roundings are much of it.
    reach = by_the_rule(rule[0], [state.abs() for state in states], gradient.float().abs(), rest.abs(), lr, count)

    numbers = rule[0].numbers(lr, count, first=True)
    positions, sent = kernel(level).send(rest, states, how, dtype, numbers, masking=masking, gradient=gradient)
    there = rest.double()
    there[positions] += sent.double()
    assert torch.equal(there, there.float().double())  # nothing was rounded off and lost
    there = there.float()
    finite = wanted.isfinite()
    assert ((there - wanted).abs() <= 2e-6 * reach)[finite].all()
    assert torch.equal(there[~finite], wanted[~finite])
    assert torch.equal(positions, largest(there, how))
    limit = torch.finfo(dtype).max
    assert torch.equal(sent, there[positions].clamp(-limit, limit).to(dtype))
    for k, (mine, other) in enumerate(zip(states, theirs, strict=True)):
        if k == 0 and masking:
            other[positions] = 0
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("level", levels())
@pytest.mark.parametrize("dtype", DTYPES)
def test_taking_has_the_bits_of_torch(dtype: torch.dtype, level: int) -> None:
    numel, how = COLUMNS + 501, row_topk(COLUMNS + 501, 0.2)
    for seed, look in enumerate(LOOKS):
        rest = drawn(numel, look, seed)
        wanted, before = rest.clone(), rest.double()
        positions, sent = kernel(level).send(rest, [], how, dtype, Numbers(), masking=True)
        assert torch.equal(take(wanted, positions, dtype), sent)
        assert torch.equal(rest, wanted)
        after = rest.double()
        after[positions] += sent.double()
        assert torch.equal(after, before)


@pytest.mark.parametrize("level", levels())
@pytest.mark.parametrize("rule", RULES)
def test_adding_alone_then_sending_is_the_same(rule: tuple[Rule, int], level: int) -> None:
    numel, how = COLUMNS + 4097, row_topk(COLUMNS + 4097, 0.01)
    found = []
    for together in (True, False):
        states, rest = [drawn(numel, "normal", 2), drawn(numel, "normal", 3).square()][: rule[1]], drawn(numel, "spread", 4)
        gradient, numbers = drawn(numel, "normal", 5), rule[0].numbers(0.1, 2, first=True)
        if not together:
            kernel(level).add(None if states else rest, states, gradient, numbers)
        last = gradient if together else None
        sent = kernel(level).send(rest, states, how, torch.bfloat16, numbers, masking=True, gradient=last)
        found.append([*sent, *states, rest])
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_gradient_is_read_right(dtype: torch.dtype) -> None:
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(dtype)
    every = every[~every.isnan()]
    for part in (every, every[100:-3], every[:5]):  # by vectors and one by one
        for level in levels():
            got = torch.zeros(part.numel())
            kernel(level).add(got, [], part.contiguous(), Numbers())
            assert torch.equal(got, part.float())


@contextmanager
def by_torch() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for module in (_error_feedback, _select):
            patch.setattr(module, "host_selection", lambda: None)
        yield


@pytest.mark.parametrize("kind", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("rule", RULES[:3])
@pytest.mark.parametrize("incoming", [torch.float32, torch.bfloat16])
def test_kept_with_and_without_it(rule: tuple[Rule, int], kind: str, incoming: torch.dtype) -> None:
    """Some steps, of two micro-batches where they can be added up: what has been sent and what waits, in all."""
    numel, parts = 5 * COLUMNS + 777, 1 if rule[1] == 2 else 2

    def run() -> tuple[torch.Tensor, list[torch.Tensor]]:
        kept = ErrorFeedback(
            rule=rule[0], states=[torch.zeros(numel) for _ in range(rule[1])], rest=residual(kind, numel, CPU), numel=numel,
            masking=False,  # or what is sent, which a rounding may decide, would change what comes
        )  # fmt: skip
        total = torch.zeros(numel)
        for step in range(3):
            how = row_topk(numel, 0.05)
            for part in range(parts - 1):
                kept.add(drawn(numel, "normal", 10 * step + part).to(incoming), 0.1, first=part == 0)
            last = drawn(numel, "normal", 10 * step + parts).to(incoming)
            positions, values = kept.add_and_send(last, how, torch.bfloat16, 0.1, step + 1, first=parts == 1)
            assert positions.numel() == values.numel() == how.entries
            total[positions] += values.float()
        return total + kept.rest.read(slice(0, numel)), kept.states

    mine, states = run()
    with by_torch():
        want, theirs = run()
    coarse = {"fp32": 1e-5, "bf16": 0.02, "int8": 0.06}[kind]  # of numbers up to 3 or so
    torch.testing.assert_close(mine, want, rtol=1e-5, atol=coarse)
    assert abs(float((mine - want).mean())) < coarse / 100  # int8 is rounded once here, and twice without states there
    for got, other in zip(states, theirs, strict=True):
        torch.testing.assert_close(got, other, rtol=1e-5, atol=1e-6)


def test_nothing_is_lost_in_many_steps() -> None:
    numel, how = COLUMNS + 999, row_topk(COLUMNS + 999, 0.01)
    kept = ErrorFeedback(rule=Momentum(momentum=0.0), states=[], rest=residual("fp32", numel, CPU), numel=numel)
    given_in, sent = torch.zeros(numel, dtype=torch.float64), torch.zeros(numel, dtype=torch.float64)
    for step in range(50):
        gradient = (drawn(numel, "spread", step) * 1024).round().clamp(-9999, 9999) / 1024  # sums of these need no rounding
        given_in += gradient.double()
        positions, values = kept.add_and_send(gradient, how, torch.bfloat16, 1.0)
        sent[positions] += values.double()
    assert torch.equal(sent + kept.rest.read(slice(0, numel)).double(), given_in)


def test_select_uses_it_and_others_do_not() -> None:
    values, how = drawn(COLUMNS + 50, "few numbers", 0), row_topk(COLUMNS + 50, 0.01)
    assert torch.equal(select_topk(values, how), largest(values, how))
    for other in (values.double(), values.bfloat16()):
        positions = select_topk(other, how)
        assert torch.equal(other[positions].abs().sort().values, other[largest(other, how)].abs().sort().values)


@pytest.mark.parametrize("dtype", DTYPES)
@given(SIZES, DENSITIES, st.sampled_from(LOOKS), st.integers(0, 1 << 20))
def test_packets_go_and_come_as_with_torch(dtype: torch.dtype, numel: int, density: float, look: str, seed: int) -> None:
    how, values, gradient = row_topk(numel, density), drawn(numel, look, seed), drawn(numel, "normal", seed + 1)
    mine, numbers = values.clone(), Numbers(rate=0.5)
    packet, wanted = (torch.zeros(packet_nbytes(how, dtype), dtype=torch.uint8) for _ in range(2))
    kernel().send_into(packet, mine, [], how, dtype, numbers, masking=True, gradient=gradient)
    pack(wanted, how, *kernel().send(values, [], how, dtype, numbers, masking=True, gradient=gradient))
    assert torch.equal(packet, wanted)
    assert torch.equal(mine.nan_to_num(), values.nan_to_num())
    came = torch.zeros(2, packet.numel() + 16, dtype=torch.uint8)  # from two ranks, in longer rows
    other = came[1, 8:-8]
    kernel().send_into(other, mine, [], how, dtype, numbers, masking=True, gradient=gradient)
    came[0, 8:-8] = packet
    master, (positions, sent), (more, too) = drawn(numel, "spread", seed + 2), *(unpack(p, how, dtype) for p in (packet, other))
    weights = [None, *(torch.full((numel,), 7.0, dtype=kind) for kind in DTYPES)]
    for weight in weights:
        got = master.clone()
        kernel().arrived(came[:, 8:-8], how, dtype, got, -1 / 3, weight)
        want = master.clone().index_add_(0, positions, sent.float(), alpha=-1 / 3)
        want.index_add_(0, more, too.float(), alpha=-1 / 3)
        assert torch.equal(got.nan_to_num(), want.nan_to_num())
        if weight is not None:
            written = torch.full_like(weight, 7.0)
            written[positions] = want[positions].to(weight.dtype)
            written[more] = want[more].to(weight.dtype)
            assert torch.equal(weight.nan_to_num(), written.nan_to_num())


def test_a_packet_that_does_not_fit() -> None:
    how = row_topk(COLUMNS + 100, 0.1)
    packet, master = torch.zeros(1, packet_nbytes(how, torch.float16), dtype=torch.uint8), torch.zeros(how.numel)
    places = packet[0, : 2 * how.entries].view(torch.int16)
    places[-1] = 100  # the rest has 100 elements
    with pytest.raises(ValueError, match="beyond the 65636 elements"):
        kernel().arrived(packet, how, torch.float16, master, 1.0)
    places[-1] = -1
    with pytest.raises(ValueError, match="beyond"):
        kernel().arrived(packet, how, torch.float16, master, 1.0)
    with pytest.raises(ValueError, match="does not fit 7 elements"):
        kernel().arrived(packet, how, torch.float16, torch.zeros(7), 1.0)
    with pytest.raises(ValueError, match="master in fp32"):
        kernel().arrived(packet, how, torch.float16, master.double(), 1.0)
    for wrong in (packet[:, 1:], packet.expand(2, -1).t(), packet.float()):
        with pytest.raises(ValueError, match="whole packets"):
            kernel().arrived(wrong, how, torch.float16, master, 1.0)
    with pytest.raises(ValueError, match="contiguous weights"):
        kernel().arrived(packet, how, torch.float16, master, 1.0, torch.zeros(7))


@pytest.mark.parametrize("dtype", DTYPES)
@given(st.integers(1, 3000), st.integers(1, 9), st.integers(0, 1 << 20))
def test_means_are_torchs(dtype: torch.dtype, numel: int, world: int, seed: int) -> None:
    values = torch.stack([drawn(numel + 3, "spread", seed + rank) for rank in range(world)]).to(dtype)
    rows, start = values.view(torch.uint8), 2 * dtype.itemsize
    first, *others = values[:, 2:-1].float()
    want = first * (1 / world)
    for other in others:
        want.add_(other, alpha=1 / world)
    torch.testing.assert_close(kernel().mean(rows, start, numel, dtype), want, rtol=0, atol=0, equal_nan=True)
    with pytest.raises(ValueError, match="not"):
        kernel().mean(rows, start, numel + 2, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("given_as", DTYPES)
@pytest.mark.parametrize("bad", [None, float("nan"), float("inf")])
def test_what_travels_whole_is_put_as_torch_does_it(dtype: torch.dtype, given_as: torch.dtype, bad: float | None) -> None:
    values, row = drawn(333, "normal", 3).to(given_as), torch.full((2000,), 7, dtype=torch.uint8)
    values[17] = 0.0 if bad is None else bad
    assert kernel().put(row, 8, values, dtype) == (bad is None)
    end = 8 + 333 * dtype.itemsize
    want = values.to(dtype) if bad is None else torch.zeros(333, dtype=dtype)
    assert torch.equal(row[8:end].view(dtype), want)
    assert bool((row[:8] == 7).all())
    assert bool((row[end:] == 7).all())
    for start in (-1, 2001 - 333 * dtype.itemsize):
        with pytest.raises(ValueError, match="do not fit a row of 2000 bytes"):
            kernel().put(row, start, values, dtype)


def test_threads_change_no_bit() -> None:
    numel, how, before = 5 * COLUMNS + 33, row_topk(5 * COLUMNS + 33, 0.01), torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 7):
            torch.set_num_threads(threads)
            u, rest = drawn(numel, "normal", 2), drawn(numel, "spread", 4)
            numbers = Numbers(carry=0.9, rate=0.1)
            sent = kernel().send(rest, [u], how, torch.float16, numbers, masking=True, gradient=drawn(numel, "normal", 5))
            found.append((*sent, u, rest))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, other) for others in found[1:] for one, other in zip(found[0], others, strict=True))


def test_what_it_is_not_made_for() -> None:
    one, how = torch.zeros(8), row_topk(8, 0.5)
    assert takes([one, one.clone()], one.bfloat16())
    assert not takes([one.double()])
    assert not takes([one], one.double())
    assert not takes([one, one[:4]])
    assert not takes([torch.zeros(16)[::2]])
    assert not takes([one.view(2, 4)])
    assert not takes([one.to("meta")])
    with pytest.raises(ValueError, match="contiguous"):
        kernel().select(one.double(), how)
    for wrong in (row_topk(9, 0.5), RowTopK(numel=8, per_row=0, from_rest=9)):
        with pytest.raises(ValueError, match="does not fit"):
            kernel().select(one, wrong)
    with pytest.raises(ValueError, match="contiguous"):
        kernel().send(one, [], how, torch.float64, Numbers(), masking=False)


# Where there is none.


def settled(monkeypatch: pytest.MonkeyPatch, **env: str) -> NativeSelect | str:
    """What a process with this environment would settle on."""
    with monkeypatch.context() as patch:
        for name, value in env.items():
            patch.setenv(name, value)
        return _native_select._settled.__wrapped__()


def test_reasons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert settled(monkeypatch, SCRIMP_NATIVE="0") == "SCRIMP_NATIVE is 0"
    assert settled(monkeypatch, PATH="", CC="") == "no C compiler (cc, gcc, clang)"
    assert isinstance(settled(monkeypatch, XDG_CACHE_HOME=str(tmp_path)), NativeSelect)
    assert len([*(tmp_path / "scrimp").iterdir()]) == 1
    send = NativeSelect.send_into

    def wrong(kernel: NativeSelect, packet: torch.Tensor, *args: object, **named: object) -> None:
        send(kernel, packet, *args, **named)  # type: ignore[arg-type]
        packet[0] ^= 1

    monkeypatch.setattr(NativeSelect, "send_into", wrong)
    assert settled(monkeypatch) == f"it does not find what torch {torch.__version__} finds"


SENDS = """
import torch
from scrimp.exchange._row_topk import row_topk
from scrimp.exchange._error_feedback import ErrorFeedback, Momentum
from scrimp.exchange._native_select import why_no_host_selection
from scrimp.exchange._packet import pack, packet_nbytes, unpack
from scrimp.exchange._residual import residual
kept = ErrorFeedback(
    rule=Momentum(momentum=0.9), states=[torch.zeros(9000)], rest=residual("fp32", 9000, torch.device("cpu")), numel=9000
)
positions, values = kept.add_and_send(torch.arange(9000.0), row_topk(9000, 0.001), torch.float32, 1.0)
print(sorted(positions.tolist()), why_no_host_selection())
"""


def test_sending_without_a_compiler(tmp_path: Path) -> None:
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "OMP_NUM_THREADS": "1", "PATH": "", "CC": ""}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", SENDS], cwd=Path(__file__).parents[2], env=env, text=True, capture_output=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == f"{list(range(8991, 9000))} no C compiler (cc, gcc, clang)"
