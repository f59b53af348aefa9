"""Chunked cross-entropy: torch's numbers and gradients, without the memory of all logits; alone and in the engine."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import scrimp
from scrimp import zoo
from scrimp.chunks.tables.optimizers import AdamW
from scrimp.engine import Engine, Memory
from scrimp.engine.chunked_loss import chunked_cross_entropy, logits_hint
from scrimp.errors import RunError
from tests.rank_jobs.moves import most_live

DIM, VOCAB = 12, 37


def plain(hidden: Tensor, weight: Tensor, targets: Tensor, *, bias: Tensor | None = None, **settings: Any) -> Tensor:
    logits = F.linear(hidden, weight, bias).flatten(0, -2)
    return F.cross_entropy(logits if logits.dtype == torch.float64 else logits.float(), targets.flatten(), **settings)


def drawn(
    shape: tuple[int, ...], dtype: torch.dtype = torch.float64, ignore: int = -100
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(*shape, DIM, generator=draw, dtype=torch.float64)
    weight = torch.randn(VOCAB, DIM, generator=draw, dtype=torch.float64)
    bias = torch.randn(VOCAB, generator=draw, dtype=torch.float64)
    targets = torch.randint(0, VOCAB, shape, generator=draw)
    targets.view(-1)[1::3] = ignore
    return hidden.to(dtype), weight.to(dtype), targets, bias.to(dtype)


def gradients(loss_of: Callable[..., Tensor], *tensors: Tensor, factor: float = 1.0, **settings: Any) -> list[Tensor]:
    """The loss, and the gradients of hidden, weight and bias."""
    hidden, weight, bias = (tensors[k].clone().requires_grad_() for k in (0, 1, 3))
    loss = loss_of(hidden, weight, tensors[2], bias=bias, **settings)
    (loss * factor).backward()
    return [loss.detach(), *(tensor.grad for tensor in (hidden, weight, bias) if tensor.grad is not None)]


@pytest.mark.parametrize("shape", [(1,), (50,), (3, 7), (2, 3, 5)])
@pytest.mark.parametrize("chunk", [1, 7, 50, 2048])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_numbers_of_torch(shape: tuple[int, ...], chunk: int, reduction: str) -> None:
    tensors = drawn(shape)
    want = gradients(plain, *tensors, reduction=reduction)
    got = gradients(chunked_cross_entropy, *tensors, chunk=chunk, reduction=reduction)
    assert len(got) == 4
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("factor", [1.0, 3.0, -0.1])
@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_other_precisions_and_outer_factors(dtype: torch.dtype, close: float, factor: float) -> None:
    tensors = drawn((64,), dtype)
    want = gradients(plain, *tensors, factor=factor)
    got = gradients(chunked_cross_entropy, *tensors, chunk=16, factor=factor)
    assert [tensor.dtype for tensor in got] == [torch.float32, dtype, dtype, dtype]
    torch.testing.assert_close(got[0], want[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got[1:], want[1:], rtol=close, atol=close / 10)


def test_sums_over_chunks_are_wider_than_bf16() -> None:
    """Chunks of one token: a sum in bf16 would lose what is small beside it."""
    tensors = drawn((2000,), torch.bfloat16)
    exact = gradients(plain, *(t.double() if t.is_floating_point() else t for t in tensors))
    got = gradients(chunked_cross_entropy, *tensors, chunk=1)
    for index in (2, 3):
        error = (got[index].double() - exact[index]).norm() / exact[index].norm()
        assert error < 0.01, error


def test_another_index_to_ignore() -> None:
    tensors = drawn((40,), ignore=5)
    want = gradients(plain, *tensors, ignore_index=5)
    torch.testing.assert_close(gradients(chunked_cross_entropy, *tensors, chunk=9, ignore_index=5), want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("tokens", [0, 5])
def test_nothing_to_learn_from(tokens: int, reduction: str) -> None:
    hidden, weight, targets, bias = drawn((tokens,))
    targets[:] = -100
    want = gradients(plain, hidden, weight, targets, bias, reduction=reduction)
    got = gradients(chunked_cross_entropy, hidden, weight, targets, bias, chunk=2, reduction=reduction)
    assert got[0].isnan() == (reduction == "mean")
    torch.testing.assert_close(got, want, equal_nan=True)


def test_large_logits() -> None:
    hidden, weight, targets, bias = drawn((20,))
    tensors = (hidden * 1e4, weight, targets, bias)
    torch.testing.assert_close(gradients(chunked_cross_entropy, *tensors), gradients(plain, *tensors))


@pytest.mark.parametrize("frozen", ["hidden", "weight", "bias"])
def test_only_the_gradients_that_are_needed(frozen: str) -> None:
    hidden, weight, targets, bias = drawn((20,))
    named = {"hidden": hidden, "weight": weight, "bias": bias}
    for name, tensor in named.items():
        tensor.requires_grad_(name != frozen)
    want = torch.autograd.grad(plain(hidden, weight, targets, bias=bias), [t for t in named.values() if t.requires_grad])
    chunked_cross_entropy(hidden, weight, targets, bias=bias, chunk=6).backward()
    assert named[frozen].grad is None
    torch.testing.assert_close([t.grad for t in named.values() if t.grad is not None], list(want))


def test_without_gradients_none_are_made() -> None:
    hidden, weight, targets, _ = drawn((4096,), torch.float32)
    weight.requires_grad_()
    with torch.no_grad(), torch.profiler.profile(profile_memory=True, acc_events=True) as profile:
        loss = chunked_cross_entropy(hidden, weight, targets, chunk=16)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, plain(hidden, weight.detach(), targets))
    assert "aten::addmm_" not in {event.key for event in profile.key_averages()}
    assert "aten::scatter_add_" not in {event.key for event in profile.key_averages()}


def test_under_a_checkpoint_and_in_a_larger_graph() -> None:
    hidden, weight, targets, _ = drawn((20,))
    results = []
    for loss_of in (plain, partial(chunked_cross_entropy, chunk=6)):
        leaf = hidden.clone().requires_grad_()
        head = weight.clone().requires_grad_()
        loss = checkpoint(loss_of, leaf.tanh(), head, targets, use_reentrant=False) + (head * head).mean()
        loss.backward()
        results.append([loss.detach(), leaf.grad, head.grad])
    torch.testing.assert_close(results[1], results[0], rtol=1e-12, atol=1e-12)


def test_inputs_that_are_not_contiguous() -> None:
    hidden, weight, targets, bias = drawn((6, 5))
    tensors = (hidden.transpose(0, 1), weight.T.contiguous().T, targets.T, bias)
    want, got = (gradients(loss_of, *tensors) for loss_of in (plain, partial(chunked_cross_entropy, chunk=7)))
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_gradients_are_given_once() -> None:
    hidden, weight, targets, _ = drawn((20,))
    loss = chunked_cross_entropy(hidden.requires_grad_(), weight, targets)
    loss.backward(retain_graph=True)
    with pytest.raises(RunError, match="second backward through one chunked_cross_entropy"):
        loss.backward()


def test_memory_is_that_of_a_chunk() -> None:
    tokens, vocab, dim = 8192, 8192, 64
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, dim, generator=draw)
    weight = torch.randn(vocab, dim, generator=draw)
    targets = torch.randint(0, vocab, (tokens,), generator=draw)

    def peak(loss_of: Callable[..., Tensor]) -> int:
        leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
        ) as profile:
            loss_of(*leaves, targets).backward()
        return most_live(profile)

    whole, chunked = peak(plain), peak(chunked_cross_entropy)
    assert 3 * chunked < whole, (chunked, whole)
    promise = hidden.nbytes + weight.nbytes + 2048 * vocab * 4
    assert chunked < 1.05 * promise, (chunked, promise)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("factor", [1.0, 1 / 3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_on_cuda_as_on_the_cpu(dtype: torch.dtype, factor: float) -> None:
    tensors = drawn((64,), dtype)
    want = gradients(chunked_cross_entropy, *tensors, chunk=16, factor=factor)
    got = gradients(chunked_cross_entropy, *(tensor.cuda() for tensor in tensors), chunk=16, factor=factor)
    close = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close([tensor.cpu() for tensor in got], want, rtol=close, atol=close / 10)


@pytest.mark.parametrize("recompute", ["keep", "recompute,offload"])
@pytest.mark.parametrize("name", ["gpt-tiny", "llama-tiny"])
def test_trained_through_the_engine(name: str, recompute: str) -> None:
    losses, states = [], []
    for settings in ({}, {"head_loss": partial(scrimp.chunked_cross_entropy, chunk=24)}):
        torch.manual_seed(0)
        model = zoo.build(name, **settings)
        states.append([*model.state_dict()])
        engine = Engine(
            copy.deepcopy(model), optimizer=AdamW(lr=3e-3), memory=Memory(device="1GiB"), device="cpu", precision="fp32",
            activations=recompute, micro_batches=2,
        )  # fmt: skip
        losses.append([float(engine.step(*zoo.example_batch(name, batch=4, step=step))) for step in range(12)])
        batch = zoo.example_batch(name, batch=4, step=99)
        losses[-1].append(float(engine.evaluate(*batch)))
        assert engine.evaluate(batch[0]).shape == (*batch[0].shape, 64)
    assert states[0] == states[1]
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)


def test_logits_that_set_the_peak() -> None:
    gib = 1 << 30
    hint = logits_hint(10 * gib, 4 * gib, (8, 4096, 32768), {32768, 4096})
    assert hint is not None
    for words in ["(8, 4096, 32768) and 4.0 GiB", "40 % of the peak: logits", "(hidden, weight, targets) would take 256.0 MiB"]:
        assert words in hint, hint
    in_bf16 = logits_hint(4 * gib, 2 * gib, (32768, 32768), [32768])
    assert in_bf16 is not None
    assert "would take 384.0 MiB" in in_bf16
    few = logits_hint(1 << 20, 1 << 19, (512, 256), [256])
    assert few is not None
    assert "targets, chunk=64) would take 64.0 KiB" in few


@pytest.mark.parametrize(
    ("peak", "largest", "shape", "vocabs"),
    [
        (1000, 249, (10, 6), [6]),  # too small a share
        (1000, 500, (10, 6), [7]),  # no output of the model
        (1000, 500, (), [6]),
        (1000, 0, (0, 6), [6]),
        (1000, 500, (1, 125), [125]),  # a chunk would be no smaller
        (0, 0, (4, 6), []),
    ],
)
def test_no_hint_where_it_would_not_help(peak: int, largest: int, shape: tuple[int, ...], vocabs: list[int]) -> None:
    assert logits_hint(peak, largest, shape, vocabs) is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden": torch.ones(4, 3)}, r"hidden \(4, 3\), weight \(37, 12\), targets \(4,\)"),
        ({"targets": torch.ones(5, dtype=torch.int64)}, r"targets \(5,\): they must be \(\.\.\., dim\)"),
        ({"weight": torch.ones(12)}, r"weight \(12,\)"),
        ({"bias": torch.ones(36)}, r"bias \(36,\): it must be \(37,\)"),
        ({"hidden": torch.ones(4, 12).bfloat16()}, "torch.bfloat16, torch.float32: .* share one dtype"),
        ({"hidden": torch.ones(4, 12).half(), "weight": torch.ones(37, 12).half()}, "too small for float16"),
        ({"targets": torch.ones(4)}, "torch.int64 as targets, not torch.float32"),
        ({"chunk": 0}, "chunk=0: .* 1 or more"),
        ({"reduction": "none"}, "reduction='none' is not one of 'mean', 'sum'"),
    ],
)
def test_what_is_refused_and_why(change: dict[str, Any], words: str) -> None:
    given = {"hidden": torch.ones(4, 12), "weight": torch.ones(37, 12), "targets": torch.zeros(4, dtype=torch.int64)}
    with pytest.raises(RunError, match=words):
        chunked_cross_entropy(**{**given, **change})
