"""Selecting, packing and keeping back: nothing is lost, and the largest go first."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scrimp.exchange._packet import pack, packet_nbytes, unpack, wrong
from scrimp.exchange._row_topk import COLUMNS, row_topk
from scrimp.exchange._select import select_topk, take

SIZES = st.one_of(st.integers(1, 70), st.integers(COLUMNS - 2, COLUMNS + 2), st.integers(1, 20 * COLUMNS))
DENSITIES = st.sampled_from([1e-4, 0.001, 0.01, 0.3, 1.0])
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


def drawn(numel: int, seed: int, spread: float = 3.0) -> torch.Tensor:
    """Of very different magnitudes, as gradients are."""
    random = torch.Generator().manual_seed(seed)
    return torch.randn(numel, generator=random) * torch.exp(spread * torch.randn(numel, generator=random))


@given(SIZES, DENSITIES, st.integers(0, 5))
def test_the_largest_of_every_row_are_found_once(numel: int, density: float, seed: int) -> None:
    values, how = drawn(numel, seed), row_topk(numel, density)
    positions = select_topk(values, how)
    assert positions.numel() == how.entries == positions.unique().numel()
    assert how.entries >= density * numel
    for start in range(0, numel, COLUMNS):
        row = values[start : start + COLUMNS].abs()
        mine = positions[(positions >= start) & (positions < start + COLUMNS)] - start
        want = row.sort(descending=True).values[: mine.numel()]
        assert torch.equal(row[mine].sort(descending=True).values, want)


@given(SIZES, DENSITIES, DTYPES, st.integers(0, 5))
def test_what_is_sent_and_what_stays_are_what_was_there(numel: int, density: float, dtype: torch.dtype, seed: int) -> None:
    values = drawn(numel, seed)
    before, how = values.double(), row_topk(numel, density)
    positions = select_topk(values, how)
    sent = take(values, positions, dtype)
    after = values.double()
    after[positions] += sent.double()
    assert torch.equal(after, before)
    assert torch.isfinite(sent).all()
    if dtype == torch.float32:
        assert not values[positions].any()


@given(SIZES, DENSITIES, DTYPES, st.integers(0, 5))
def test_packets_come_out_as_they_went_in(numel: int, density: float, dtype: torch.dtype, seed: int) -> None:
    values, how = drawn(numel, seed), row_topk(numel, density)
    positions = select_topk(values, how)
    sent = take(values, positions, dtype)
    packet = torch.full((packet_nbytes(how, dtype),), 255, dtype=torch.uint8)
    pack(packet, how, positions, sent)
    again, got = unpack(packet, how, dtype)
    assert torch.equal(again, positions)
    assert torch.equal(got, sent)
    assert not wrong(packet, how, dtype)
    assert packet.numel() <= (2 + dtype.itemsize) * how.entries + 14
    assert packet.numel() % 8 == 0


def test_a_place_beyond_the_parameter_is_seen() -> None:
    how = row_topk(COLUMNS + 10, 0.01)
    packet = torch.zeros(packet_nbytes(how, torch.bfloat16), dtype=torch.uint8)
    positions = select_topk(torch.randn(how.numel), how)
    positions[-1] = how.numel
    pack(packet, how, positions, torch.zeros(how.entries, dtype=torch.bfloat16))
    assert wrong(packet, how, torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_quadratic_bowl_is_descended_by_few_entries_of_each_worker(dtype: torch.dtype) -> None:
    """Four workers whose own minima differ: with what is kept back they come to that of all; without, they do not."""
    torch.manual_seed(0)
    numel, how = 5000, row_topk(5000, 0.01)
    minima = torch.randn(4, numel)
    ends = []
    for keeping in (True, False):
        weight, left = torch.zeros(numel), torch.zeros(4, numel)
        for step in range(2500):
            update = torch.zeros(numel)
            for worker in range(4):
                left[worker] += weight - minima[worker]
                positions = select_topk(left[worker], how)
                update[positions] += take(left[worker], positions, dtype).float() / 4
                if not keeping:
                    left[worker].zero_()
            weight -= 0.005 * (1 - step / 2500) * update
        ends.append(float((weight - minima.mean(0)).norm() / minima.mean(0).norm()))
    assert ends[0] < 0.05
    assert ends[1] > 2 * ends[0]
