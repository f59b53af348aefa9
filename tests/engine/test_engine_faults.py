"""What models and users do that they should not, or that engines often get wrong: refused with the way out, or right."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from scrimp import zoo
from scrimp.chunks.store.placement import DEVICE
from scrimp.errors import RunError
from tests.engine.test_engine import adamw, assert_same, engine_for, run, traced_peak
from tests.support.reference import train_bf16, train_fp32

BATCHES = [(torch.randn(4, 16, generator=torch.Generator().manual_seed(k)),) for k in range(6)]


class Block(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.drop = nn.Dropout(dropout)

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.down(torch.relu(self.up(x))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x)


class Net(nn.Module):
    def __init__(self, block: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.inp = nn.Linear(16, 16)
        self.blocks = nn.ModuleList(block() for _ in range(4))
        self.head = nn.Linear(16, 8)

    def body(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x).square().mean()


def net(block: Callable[[], nn.Module] = Block, kind: type[Net] = Net) -> Net:
    torch.manual_seed(0)
    return kind(block)


# The model's own checkpointing.


class Checkpointing(Block):
    """Of a part of a layer: what runs again in backward is not the layer's forward."""

    reentrant = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + checkpoint(self.inner, x, use_reentrant=self.reentrant)


class Reentrant(Checkpointing):
    reentrant = True


class Outside(Net):
    def body(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return self.head(x)


@pytest.mark.parametrize("recompute", ["keep", "recompute,offload"])
@pytest.mark.parametrize(("block", "kind"), [(Checkpointing, Net), (Reentrant, Net), (Block, Outside)])
def test_checkpointing_inside_the_model_is_right(block: Any, kind: Any, recompute: str) -> None:
    model = net(block, kind)
    want, _ = train_fp32(model, BATCHES, adamw)
    for device in ("1GiB", "42KiB"):
        engine = engine_for(model, device, precision="fp32", activations=recompute)
        run(engine, tuple(BATCHES))
        assert_same(engine.state_dict(), want)


class TwoReentrant(Net):
    def body(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for _ in range(2):  # a weight gets a gradient from each
            x = checkpoint(self.blocks[0], x, use_reentrant=True)
        return self.head(x)


class BackwardInside(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss = super().forward(x)
        loss.backward(retain_graph=True)
        return loss


def steps(model: nn.Module, **settings: Any) -> Callable[[], Any]:
    return lambda: engine_for(model, precision="bf16", **settings).step(*BATCHES[0])


def backward_in_loss(out: torch.Tensor) -> torch.Tensor:
    out.backward()
    return out.detach()


class Nothing(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean()


class Integers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(4, dtype=torch.int64), requires_grad=False)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (steps(net(kind=TwoReentrant)), ["second gradient for blocks.0", "use_reentrant=False"]),
        (steps(net(kind=BackwardInside)), ["before the engine's backward", "return the loss"]),
        (steps(net(), loss=backward_in_loss), ["before the engine's backward", "return the loss"]),
        (steps(net(), loss=lambda out: out.detach()), ["depends on no trained parameter", "detached"]),
        (steps(net(), loss=lambda out: torch.ones((), requires_grad=True) * 2), ["no trained parameter got a gradient"]),
        (steps(net(), loss=lambda out: None), ["NoneType", "loss=function"]),
        (steps(net().requires_grad_(False)), ["no parameter of the model is trained", "engine.evaluate"]),
        (steps(Nothing()), ["no parameter of the model is trained"]),
        (steps(Integers()), ["parameter table is torch.int64"]),
    ],
)
def test_what_is_refused_and_why(make: Any, words: list[str]) -> None:
    with pytest.raises(RunError) as caught:
        make()
    for word in words:
        assert word in str(caught.value), str(caught.value)


@pytest.mark.parametrize("device", ["1GiB", "42KiB"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_after_any_failure_the_next_step_is_as_if_it_had_not_been(precision: str, device: str) -> None:
    """An error in the middle of backward, where gradients stand in the place of weights."""
    model = net(lambda: Block(dropout=0.5))
    want = engine_for(model, device, precision=precision)
    engine = engine_for(model, device, precision=precision)
    torch.manual_seed(1)
    losses = run(want, tuple(BATCHES))
    torch.manual_seed(1)
    got = run(engine, tuple(BATCHES[:3]))
    for error in (ValueError, KeyboardInterrupt):
        receive, calls = engine._run.store.receive, 0

        def fail(*args: Any, first: bool) -> None:
            nonlocal calls
            calls += 1
            if calls == 9:
                raise error("in the middle")  # noqa: B023
            receive(*args, first=first)  # noqa: B023

        engine._run.store.receive = fail  # type: ignore[method-assign]
        with pytest.raises(error):
            engine.step(*BATCHES[3])
        engine._run.store.receive = receive  # type: ignore[method-assign]
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            engine.step(torch.ones(4, 5))
    got += run(engine, tuple(BATCHES[3:]))
    assert got == losses
    assert_same(engine.state_dict(), want.state_dict())


# Between steps.


def test_the_model_between_steps_has_no_weights_and_says_so() -> None:
    engine = engine_for(net(), "42KiB")
    for _ in range(2):
        with pytest.raises(RunError, match=r"called outside of the engine.*engine\.evaluate"):
            engine._run.model(*BATCHES[0])
        with pytest.raises(RunError, match=r"layer 'blocks\.1' was called outside of the engine"):
            engine._run.model.blocks[1](*BATCHES[0])
        with pytest.raises(RunError, match=r"engine\.state_dict\(\)"):
            engine._run.model.state_dict()
        with pytest.raises(RunError, match=r"Engine\(model, weights=\.\.\.\)"):
            engine._run.model.load_state_dict({})
        for copying in (copy.deepcopy, pickle.dumps):
            with pytest.raises(RunError, match=r"cannot be copied or pickled.*engine\.state_dict\(\)"):
                copying(engine._run.model)
        weight = engine._run.model.head.weight
        assert (weight.is_meta, weight.shape, weight.requires_grad) == (True, (8, 16), True)
        with pytest.raises(RunError, match=r"engine\.full_parameters\(\)"):
            weight.norm()
        engine.step(*BATCHES[0])


def add_parameter(model: Any) -> None:
    model.extra = nn.Parameter(torch.ones(3))


def add_module(model: Any) -> None:
    model.blocks[1].extra = nn.Linear(2, 2)


def replace(model: Any) -> None:
    model.head.weight = nn.Parameter(torch.ones(8, 16))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (add_parameter, "modules or parameters were added"),
        (add_module, "modules or parameters were added"),
        (replace, "parameter head.weight was replaced"),
        (lambda model: model.head.requires_grad_(False), "requires_grad of head.weight is False, it was True"),
    ],
)
def test_changes_to_the_model_after_it_was_taken_over(change: Any, words: str) -> None:
    engine = engine_for(net())
    engine.step(*BATCHES[0])
    change(engine._run.model)
    with pytest.raises(RunError, match=rf"{words}.*build a new model and Engine"):
        engine.step(*BATCHES[0])


class GivesWeights(Net):
    def forward(self, x: torch.Tensor) -> Any:
        return {"loss": super().forward(x), "parts": [self.head.weight, self.blocks[0].up.bias]}


def test_weights_that_an_evaluation_gives_out_stay() -> None:
    model = net(kind=GivesWeights)
    engine = engine_for(model, "42KiB", precision="fp32")
    parts = engine.evaluate(*BATCHES[0])["parts"]
    assert torch.equal(parts[0], model.head.weight)
    assert torch.equal(parts[1], model.blocks[0].up.bias)


# Batches.


class Nested(Net):
    def forward(self, batch: dict[str, Any], *, scale: torch.Tensor, how: str) -> Any:
        assert how == "so"
        out = self.body(batch["x"][0]) + self.body(batch["x"][1])
        return {"loss": (out * scale).square().mean(), "out": out}


@pytest.mark.parametrize("accumulate", [1, 2])
def test_keywords_and_nested_batches_of_another_dtype(accumulate: int) -> None:
    model = net(kind=Nested)
    plain = copy.deepcopy(model)
    optimizer = adamw(list(plain.parameters()))
    engine = engine_for(model, precision="fp32", micro_batches=accumulate)
    for (x,) in BATCHES:
        scale = torch.full((4, 1), 2.0)
        engine.step({"x": [x.double(), x.half().double()]}, scale=scale.double(), how="so")
        for k in range(accumulate):
            a, b, s = (t.chunk(accumulate)[k] for t in (x, x.half().float(), scale))
            loss = plain({"x": [a, b]}, scale=s, how="so")["loss"]
            (loss / accumulate if accumulate > 1 else loss).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_same(engine.state_dict(), plain.state_dict())


class Penalty(Net):
    """Differentiates in its forward, and backward goes through that."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        out = self.body(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return out.square().mean() + slope.square().mean()


def test_a_gradient_penalty() -> None:
    model = net(kind=Penalty)
    want, losses = train_fp32(model, BATCHES, adamw)
    for device in ("1GiB", "42KiB"):
        engine = engine_for(model, device, precision="fp32", activations="keep")
        assert run(engine, tuple(BATCHES)) == losses
        assert_same(engine.state_dict(), want)


# State of modules and random numbers.


class Normed(Block):
    """Running statistics, one of which is not written into but replaced; and random numbers."""

    def __init__(self) -> None:
        super().__init__(0.3)
        self.norm = nn.BatchNorm1d(16)
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.inner(self.norm(x).to(x.dtype))
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().float().mean(0)
        return x - self.mean.to(x.dtype)


@pytest.mark.parametrize("recompute", ["keep", "recompute,offload", "auto"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_running_statistics_and_dropout(precision: str, recompute: str) -> None:
    model = net(Normed)
    model.blocks[1].norm.eval()  # a frozen one, as the user set it
    loop = train_fp32 if precision == "fp32" else train_bf16
    torch.manual_seed(5)
    want, losses = loop(_keep_eval(model), BATCHES, adamw)
    for device in ("1GiB", "96KiB"):
        engine = engine_for(model, device, precision=precision, activations=recompute)
        torch.manual_seed(5)
        assert run(engine, tuple(BATCHES)) == losses
        assert_same(engine.state_dict(), want)
        assert not engine._run.model.blocks[1].norm.training
        assert engine._run.model.blocks[2].norm.training
        assert engine._run.model.training


def _keep_eval(model: nn.Module) -> nn.Module:
    """The plain loops call train(): this one's eval mode outlives that."""
    kept = copy.deepcopy(model)
    kept.blocks[1].norm.train = lambda mode=True: kept.blocks[1].norm
    return kept


def test_a_step_that_is_tried_again_counts_once() -> None:
    """First with a schedule for a small batch, homes on the device; then a batch that does not fit beside them."""
    shape = {"layers": 4, "seq": 64, "dim": 32, "dropout": 0.3}
    torch.manual_seed(0)
    model = zoo.build("gpt-tiny", **shape)
    small = [zoo.example_batch("gpt-tiny", batch=1, step=step, **shape) for step in range(4)]
    large = [zoo.example_batch("gpt-tiny", batch=8, step=step, **shape) for step in range(2)]
    torch.manual_seed(5)
    want, losses = train_bf16(model, [*small, *large, *small], adamw)
    state = torch.get_rng_state()
    probe = engine_for(model, activations="recompute,offload")
    probe.step(*large[0])
    budget = traced_peak(probe)
    engine = engine_for(model, budget)
    tries = 0
    begin = engine._run.residents.begin_step

    def counting(*args: Any, **kwargs: Any) -> None:
        nonlocal tries
        tries += 1
        begin(*args, **kwargs)

    engine._run.residents.begin_step = counting  # type: ignore[method-assign]
    torch.manual_seed(5)
    assert run(engine, tuple(small)) == losses[:4]
    assert any(placement.tier == DEVICE for placement in engine._run.store.placements)
    assert run(engine, (*large, *small)) == losses[4:]
    assert tries > 10
    assert torch.equal(torch.get_rng_state(), state)
    assert_same(engine.state_dict(), want)
    assert engine.ledger.peak_nbytes <= budget


def test_modes_are_the_users() -> None:
    engine = engine_for(net().eval())
    with pytest.warns(UserWarning, match=r"trained in eval mode.*call model\.train\(\)"):
        engine.step(*BATCHES[0])
    engine.step(*BATCHES[0])
    assert not any(module.training for module in engine._run.model.modules())
    engine._run.model.blocks[2].train()
    engine.evaluate(*BATCHES[0])
    assert engine._run.model.blocks[2].drop.training
    assert not engine._run.model.blocks[1].drop.training


@pytest.mark.parametrize("recompute", ["keep", "recompute,offload"])
def test_hooks_of_the_users(recompute: str) -> None:
    """Each is called as often as in a plain loop, and may change what passes."""

    def hooked(model: nn.Module, calls: list[str]) -> nn.Module:
        model.blocks[1].register_forward_pre_hook(lambda _, args: calls.append("pre"))
        model.blocks[1].register_forward_hook(lambda _, args, out: calls.append("post") or out * 2)
        model.blocks[2].register_full_backward_hook(lambda _, inside, outside: calls.append("backward"))
        return model

    calls: list[str] = []
    want, _ = train_fp32(hooked(net(), calls), BATCHES, adamw)
    found: list[str] = []
    engine = engine_for(net(), "42KiB", precision="fp32", activations=recompute)
    hooked(engine._run.model, found)
    run(engine, tuple(BATCHES))
    assert found == calls
    assert_same(engine.state_dict(), want)
