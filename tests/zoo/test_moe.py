"""The mixture of experts: what all experts on all tokens would give, whatever the router chooses."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from scrimp import zoo
from scrimp.errors import ScrimpError
from scrimp.zoo.configs import MoEConfig
from scrimp.zoo.moe import Mixture
from tests.support.same_experts import to_the_first_two

U = 2.0**-24  # half the distance of two float32 numbers at 1


def every_expert_on_every_token(mixture: Mixture, x: Tensor) -> tuple[Tensor, Tensor]:
    """In float64, with the experts that the float32 router chooses. Also a bound of the float32 result's error: a sum of n
    products loses at most n U of the sum of their absolute values, and gelu grows an error by at most 1.13."""
    which = mixture.router(x).topk(mixture.chosen).indices
    x, experts, router = x.double(), mixture.experts, mixture.router.weight.double()
    up, up_bias, down, down_bias = (each.double() for each in (experts.up, experts.up_bias, experts.down, experts.down_bias))
    dim, hidden = up.shape[1:]
    chosen = (x @ router.T).gather(-1, which).softmax(-1)
    gates = torch.zeros(*x.shape[:2], len(up), dtype=x.dtype).scatter(-1, which, chosen)
    inner = torch.nn.functional.gelu(torch.einsum("gtd,edh->gteh", x, up) + up_bias[:, 0])
    made = torch.einsum("gteh,ehd->gted", inner, down) + down_bias
    mixed = torch.einsum("gte,gted->gtd", gates, made)

    of_score = dim * U * (x.abs() @ router.abs().T).amax(-1)  # a gate's relative error is twice that of its scores, and a few U
    before = torch.einsum("gtd,edh->gteh", x.abs(), up.abs()) + up_bias[:, 0].abs()
    of_inner = (1.13 * (dim + 1) + 4) * U * before  # gelu itself loses a few U of its argument
    of_made = torch.einsum("gteh,ehd->gted", of_inner + (hidden + 1) * U * inner.abs(), down.abs())
    of_made = of_made + (hidden + 1) * U * down_bias.abs()
    of_gate = 2 * of_score + (8 + mixture.chosen) * U
    bound = torch.einsum("gte,gted->gtd", gates, of_made + of_gate[..., None, None] * made.abs())
    return mixed, bound


def mixture_of(blocks: int, chosen: int, *, same: bool) -> tuple[Mixture, Tensor]:
    torch.manual_seed(0)
    mixture = Mixture(MoEConfig(dim=16, heads=1, experts=8, chosen=chosen, expansion=2, expert_parallel=blocks))
    x = torch.randn(3, 10, 16)
    if same:
        x = x - x.mean(-1, keepdim=True) + 1
        to_the_first_two(mixture)
    return mixture, x.requires_grad_()


@pytest.mark.parametrize("same", [False, True])
@pytest.mark.parametrize("chosen", [1, 2, 3])
@pytest.mark.parametrize("blocks", [1, 2, 4, 8])
def test_no_token_is_dropped(blocks: int, chosen: int, same: bool) -> None:
    mixture, x = mixture_of(blocks, chosen, same=same)
    if same:
        used = mixture.router(x).topk(chosen).indices.flatten(0, 1)
        assert (used == used[:1]).all()
    mixed, _ = mixture(x)
    wanted, bound = every_expert_on_every_token(mixture, x)
    assert ((mixed - wanted).abs() <= bound).all()
    weights = [x, *mixture.parameters()]
    y = torch.randn_like(mixed)
    # Sums over at most 30 tokens and 32 + 16 products, each of which loses a rounding: 78 U = 4.6e-6 of the gradient's norm.
    for ours, theirs in zip(
        torch.autograd.grad(mixed, weights, y), torch.autograd.grad(wanted, weights, y.double()), strict=True
    ):
        assert float((ours - theirs).norm()) <= 1e-5 * float(theirs.norm())


@pytest.mark.parametrize(("blocks", "rows"), [(1, 20), (2, 20), (4, 20), (8, 10)])
def test_shapes_do_not_depend_on_the_data(blocks: int, rows: int) -> None:
    """Rows of a block are the tokens of a group times min(chosen, experts of a block)."""
    for same in (False, True):
        mixture, x = mixture_of(blocks, 2, same=same)
        seen: list[tuple[int, ...]] = []
        mixture.experts.register_forward_pre_hook(lambda _, given, seen=seen: seen.append(tuple(given[0].shape)))
        mixture(x)
        assert seen == [(3, blocks, rows, 16)]


def test_blocks_do_not_change_the_weights_of_a_model() -> None:
    states = [zoo.build("moe-tiny", expert_parallel=blocks).state_dict() for blocks in (1, 4)]
    assert {name: each.shape for name, each in states[0].items()} == {name: each.shape for name, each in states[1].items()}
    with pytest.raises(ScrimpError, match="experts 4 is not a multiple of expert_parallel 3"):
        zoo.build("moe-tiny", expert_parallel=3)
