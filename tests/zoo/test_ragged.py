"""The operators of ragged rows: each expert's rows with its matrix, gradients as autograd's, padding neither read nor written."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from scrimp.zoo.ragged import ragged_linear, ragged_outer


def case(seed: int, groups: int, blocks: int, experts: int, rows: int, *, empty: bool = False) -> tuple[Tensor, ...]:
    torch.manual_seed(seed)
    ends = torch.randint(rows + 1, (groups, blocks, experts)).sort().values * (not empty)
    shapes = (groups, blocks, rows, 3), (blocks, experts, 3, 5), (blocks, experts, 5)
    x, weight, bias = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes)
    return x, ends, weight, bias


def plainly(x: Tensor, ends: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Every expert on every row; masks select."""
    at = torch.arange(x.shape[2])
    starts = torch.cat([torch.zeros_like(ends[..., :1]), ends[..., :-1]], -1)
    mine = (at >= starts[..., None]) & (at < ends[..., None])
    every = torch.einsum("gbrd,bedh->gberh", x, weight) + (0 if bias is None else bias[:, :, None])
    return (every * mine[..., None]).sum(2)


@given(
    st.integers(0, 9), st.integers(1, 3), st.integers(1, 3), st.integers(1, 4), st.integers(1, 6), st.booleans(), st.booleans()
)
def test_rows_get_their_expert_and_gradients_are_those_of_autograd(
    seed: int, groups: int, blocks: int, experts: int, rows: int, biased: bool, empty: bool
) -> None:
    x, ends, weight, bias = case(seed, groups, blocks, experts, rows, empty=empty)
    given = (x, ends, weight, bias if biased else None)
    made, wanted = ragged_linear(*given, 0), plainly(*given)
    torch.testing.assert_close(made, wanted)
    y = torch.randn_like(made)
    trained = [each for each in (x, weight, bias) if biased or each is not bias]
    for ours, theirs in zip(torch.autograd.grad(made, trained, y), torch.autograd.grad(wanted, trained, y), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_padding_is_not_read_and_gives_zeros() -> None:
    x, ends, weight, bias = case(0, 2, 2, 3, 6)
    ends.clamp_(max=4)
    with torch.no_grad():
        x[:, :, 4:] = math.nan
    made = ragged_linear(x, ends, weight, bias, 0)
    assert not made[:, :, 4:].any()
    for gradient in torch.autograd.grad(made, (x, weight, bias), torch.ones_like(made)):
        assert torch.isfinite(gradient).all()


def test_groups_are_not_added_in_16_bits() -> None:
    """Positive numbers: a group's product loses at most half a unit, 2^-8 of itself, as does the sum of all."""
    torch.manual_seed(0)
    x, y = (torch.rand(256, 1, 2, 8).bfloat16() for _ in range(2))
    ends = torch.full((256, 1, 1), 2)
    weight, bias = ragged_outer(x, y, ends, 2)
    products, sums = torch.einsum("gbrd,gbrh->bdh", x.double(), y.double())[:, None], y.double().sum((0, 2))[:, None]
    assert ((weight - products).abs() <= 2.01 * 2**-8 * products).all()
    assert ((bias - sums).abs() <= 1.01 * 2**-8 * sums).all()


def test_torch_accepts_the_operators() -> None:
    """Schemas, fake tensors, and gradients that tracing sees."""
    x, ends, weight, bias = case(0, 2, 2, 3, 6)
    torch.library.opcheck(ragged_linear, (x, ends, weight, bias, 6))
    torch.library.opcheck(ragged_linear, (x, ends, weight, None, 6))
    torch.library.opcheck(ragged_outer, (x.detach(), torch.randn(2, 2, 6, 5, dtype=torch.float64), ends, 6))
