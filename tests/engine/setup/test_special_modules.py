"""Modules that need care: attention called with one tensor three times, sparse embeddings, compiled and complex modules."""

from __future__ import annotations

import copy
import sys
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from scrimp.engine import Engine, Memory
from scrimp.engine.setup.compiled_private import compiled
from scrimp.engine.step.input_offload import LayerInputs
from scrimp.errors import FitError, RunError
from tests.engine.test_engine import LR, AdamW, adamw, assert_same
from tests.support.reference import train_bf16, train_fp32

SEQ, DIM = 48, 32


# Inputs that are offloaded.


class Attending(nn.Module):
    """`nn.MultiheadAttention` asks with `is` whether queries, keys and values are one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.attend = nn.ModuleList(nn.MultiheadAttention(DIM, 4, batch_first=True) for _ in range(4))
        self.last = nn.Linear(DIM, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for k, attend in enumerate(self.attend):
            x = x + (attend(x, x, x)[0] if k % 2 else attend(x, key=x, value=x, need_weights=False)[0])
        return self.last(x).float().square().mean()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_multihead_attention_with_offloaded_inputs(precision: str) -> None:
    torch.manual_seed(0)
    model, batches = Attending(), [(torch.randn(4, SEQ, DIM),) for _ in range(4)]
    want, losses = (train_fp32 if precision == "fp32" else train_bf16)(model, batches, adamw)
    engine = Engine(copy.deepcopy(model), optimizer=AdamW(lr=LR), memory=Memory(device="1GiB"), device="cpu", precision=precision)
    offloaded(engine)
    assert [engine.step(*batch).item() for batch in batches] == losses
    assert_same(engine.state_dict(), want)
    assert (
        engine._run.store.traffic.down_nbytes > 4 * 4 * 4 * SEQ * DIM * engine._run.store.dtype.itemsize
    )  # inputs, not gradients alone


def offloaded(engine: Engine) -> None:
    """From now on every layer is recomputed from inputs that were on the host, whatever the budget."""
    prepare = engine._run.planning.prepare

    def prepared(signature: Any) -> Any:
        plan = prepare(signature)
        engine._run.recompute.again, engine._run.recompute.offloaded = engine._run.recompute.recomputable, True
        return plan

    engine._run.planning.prepare = prepared  # type: ignore[method-assign]


def test_inputs_come_back_as_they_were() -> None:
    """The same tensor once, wherever it was passed; the same strides, gaps and overlaps; and no byte twice."""
    engine = Engine(nn.Linear(4, 4), memory=Memory(device="1MiB"), device="cpu")
    x = torch.randn(2, 3, 8, requires_grad=True)
    y = x * 2
    q, k, v = y.chunk(3, 1)
    turned, gaps, wide, shared = y.transpose(0, 2), (x * 3)[:, 0], (x[:, :1] * 4).expand(2, 5, 8), x.permute(2, 1, 0) * 5
    mask, none = torch.ones(3), (x * 6)[:0]
    args = (q, k, {"v": v, "again": [q, (turned,)]}, mask)
    kwargs = {"q": q, "gaps": gaps, "wide": wide, "none": none, "s": shared}
    inputs = LayerInputs(args, kwargs, engine._run.store, engine._run.meter)
    first_args, _ = inputs.bring()
    assert first_args[0] is q
    inputs.offload()
    assert engine.ledger.host.now["activations"] == y.nbytes + gaps.nbytes + 2 * 8 * 4 + shared.nbytes
    (new_q, new_k, nested, new_mask), named = inputs.bring()
    assert new_q is nested["again"][0] is named["q"]
    assert new_mask is mask
    assert named["none"] is none
    pairs = [(new_q, q), (new_k, k), (nested["v"], v), (nested["again"][1][0], turned), (named["gaps"], gaps)]
    for new, old in [*pairs, (named["wide"], wide), (named["s"], shared)]:
        assert torch.equal(new, old)
        assert new.stride() == old.stride()
        assert new.requires_grad
        assert new.is_leaf
        assert new.untyped_storage().data_ptr() != old.untyped_storage().data_ptr()
    assert len({new.untyped_storage().data_ptr() for new, _ in pairs[:4]}) == 1
    with torch.no_grad():
        new_q.fill_(7)
    assert (nested["again"][1][0].transpose(0, 2)[:, :1] == 7).all()
    del inputs
    assert engine.ledger.host.now["activations"] == 0


class Changes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x += 1
        return self.two(self.one(x).relu()) + x


class ChangesInputs(nn.Module):
    """The last block leaves its input alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(Changes() for _ in range(3))
        self.last = nn.Sequential(nn.Linear(DIM, DIM), nn.ReLU(), nn.Linear(DIM, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x).float().square().mean()


@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.full), "bf16"])
def test_a_layer_that_changes_its_input_is_not_recomputed(precision: str) -> None:
    """It would be computed from the changed input, without a word."""
    torch.manual_seed(0)
    model, batches = ChangesInputs(), [(torch.randn(4, DIM),) for _ in range(4)]
    want, losses = (train_fp32 if precision == "fp32" else train_bf16)(model, batches, adamw)
    settings: dict[str, Any] = {"precision": precision, "activations": "recompute,offload"}
    engine = Engine(copy.deepcopy(model), optimizer=AdamW(lr=LR), memory=Memory(device="1GiB"), device="cpu", **settings)
    recomputable = engine._run.recompute.recomputable
    with pytest.warns(UserWarning, match=r"layer 'blocks\.\d' was changed in place by its own forward.*keeps its activations"):
        assert [engine.step(*batch).item() for batch in batches] == losses
    assert_same(engine.state_dict(), want)
    paths = {engine._run.store.table.layers[k].path for k in recomputable - engine._run.recompute.recomputable}
    assert paths == {f"blocks.{k}" for k in range(3)}
    settings["device"], settings["optimizer"], settings["activations"] = "cpu", AdamW(lr=LR), "auto"
    with pytest.raises(FitError) as caught:  # before it has come to the last of those layers
        Engine(copy.deepcopy(model), memory=Memory(device=12_000 if precision == "fp32" else 8_000), **settings).step(*batches[0])
    assert caught.value.least_nbytes is not None
    engine = Engine(copy.deepcopy(model), memory=Memory(device=caught.value.least_nbytes), **settings)
    assert engine.step(*batches[0]).item() == losses[0]


# Embeddings with sparse gradients.


class Bags(nn.Module):
    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(40, 16, sparse=sparse, padding_idx=0)
        self.bags = nn.EmbeddingBag(30, 16, sparse=sparse, mode="mean")
        self.last = nn.Linear(16, 4)

    def forward(self, tokens: torch.Tensor, bags: torch.Tensor) -> torch.Tensor:
        return self.last(self.tokens(tokens).mean(1) + self.bags(bags)).float().square().mean()


def bags_batches() -> list[Any]:
    draw = torch.Generator().manual_seed(1)
    return [(torch.randint(0, 40, (6, 9), generator=draw), torch.randint(0, 30, (6, 5), generator=draw)) for _ in range(5)]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_sparse_embeddings_train_with_dense_gradients(precision: str) -> None:
    """With the bits of plain PyTorch where they are dense, and one warning."""
    torch.manual_seed(0)
    model = Bags(sparse=True)
    dense = Bags(sparse=False)
    dense.load_state_dict(model.state_dict())
    want, losses = (train_fp32 if precision == "fp32" else train_bf16)(dense, bags_batches(), adamw)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine = Engine(model, optimizer=AdamW(lr=LR), memory=Memory(device="1GiB"), device="cpu", precision=precision)
    (warning,) = caught
    assert str(warning.message).startswith("sparse=True of 'tokens', 'bags' is now sparse=False: the engine trains")
    assert warning.filename == __file__
    assert [engine.step(*batch).item() for batch in bags_batches()] == losses
    assert_same(engine.state_dict(), want)


class ByHand(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(20, 4))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return functional.embedding(tokens, self.weight, sparse=True).square().mean()


def test_a_sparse_gradient_is_refused_and_nothing_has_changed() -> None:
    engine = Engine(ByHand(), memory=Memory(device="1MiB"), device="cpu", precision="fp32")
    before = engine.state_dict()
    with pytest.raises(RunError, match=r"gradient of weight has the layout torch\.sparse_coo.* with sparse=False"):
        engine.step(torch.tensor([1, 2]))
    assert_same(engine.state_dict(), before)


def test_an_embedding_that_rescales_its_weights_is_refused() -> None:
    model = nn.Sequential(nn.Embedding(4, 4, max_norm=1.0), nn.Linear(4, 4))
    with pytest.raises(RunError, match=r"'0' \(Embedding\) has max_norm=1\.0: its forward rescales .* with max_norm=None"):
        Engine(model, memory=Memory(device="1MiB"), device="cpu")


# Compiled and complex modules.


def small() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU()))


def whole(model: nn.Sequential) -> nn.Module:
    return torch.compile(model, backend="eager")  # type: ignore[return-value]


def part(model: nn.Sequential) -> nn.Module:
    model[1] = torch.compile(model[1], backend="eager")
    return model


def call(model: nn.Sequential) -> nn.Module:
    model[1][0].compile(backend="eager")
    return model


def forward(model: nn.Sequential) -> nn.Module:
    model[1].forward = torch.compile(model[1].forward, backend="eager")
    return model


WAYS = [
    (whole, r"^'the model itself' is compiled \(torch\.compile\(module\)\).*yet; give it the model as it was.*\._orig_mod"),
    (part, r"^'1' is compiled \(torch\.compile\(module\)\)"),
    (call, r"^'1\.0' is compiled \(module\.compile\(\)\).*does not run compiled layers yet; give it the model as it was before"),
    (forward, r"^'1' is compiled \(torch\.compile\(module\.forward\)\)"),
]


@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize(("way", "words"), WAYS, ids=lambda value: getattr(value, "__name__", ""))
def test_a_compiled_model_is_refused(way: Any, words: str) -> None:
    """At construction; and where it was compiled after that, before the next step, which has changed nothing."""
    with pytest.raises(RunError, match=words):
        Engine(way(small()), memory=Memory(device="1MiB"), device="cpu", loss=torch.sum)
    if way is whole:
        return  # the engine still has the model that was not compiled
    engine = Engine(small(), memory=Memory(device="1MiB"), device="cpu", loss=torch.sum)
    engine.step(torch.ones(2, 4))
    way(engine._run.model)
    with pytest.raises(RunError, match=words):
        engine.step(torch.ones(2, 4))
    with pytest.raises(RunError, match=words):
        engine.evaluate(torch.ones(2, 4))
    assert engine.optimizer.steps == 1


@pytest.mark.filterwarnings("ignore")
def test_what_must_not_be_compiled_is_not_compiled() -> None:
    model = small()
    model[1].forward = torch.compiler.disable(model[1].forward)
    assert "torch._dynamo.eval_frame" in sys.modules  # so that `compiled` does look
    assert compiled(model) is None


def test_complex_parameters_are_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, dtype=torch.complex64))
    with pytest.raises(RunError, match=r"parameter 1\.weight is torch\.complex64; the engine trains and keeps floating-point"):
        Engine(model, memory=Memory(device="1MiB"), device="cpu")
