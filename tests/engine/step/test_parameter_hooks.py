"""Hooks on parameters run as plain PyTorch runs them, or are refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from scrimp import SGD, Engine, Memory, RunError
from scrimp.engine.setup.rnn_private import NAME as RNN_REFERENCES
from scrimp.engine.step.hooks_private import post_accumulate_hooks, share_tensor_hooks
from tests.engine.test_engine_review import Net


def batches(count: int = 5) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(8, 16, generator=draw) for _ in range(count)]


def engine_of(model: nn.Module, **settings: Any) -> Engine:
    settings = {"memory": Memory(device="1GiB"), "precision": "fp32", "device": "cpu", "optimizer": SGD(lr=0.05), **settings}
    return Engine(model, **settings)


def plainly(model: nn.Module, data: list[torch.Tensor], parts: int = 1) -> dict[str, torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, fused=True)
    for batch in data:
        for part in batch.chunk(parts):
            (model(part) / parts if parts > 1 else model(part)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def clamp(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.clamp(-1e-3, 1e-3)


def halve(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5).add_(parameter.detach(), alpha=0.01)  # reads the weight


def drop(parameter: torch.Tensor) -> None:
    parameter.grad = None


HOOKS: dict[str, Callable[[nn.Module], Any]] = {
    "tensor": lambda model: model.blocks[1][0].weight.register_hook(clamp),
    "post-accumulate": lambda model: model.blocks[1][2].weight.register_post_accumulate_grad_hook(halve),
    "no gradient": lambda model: model.blocks[0][0].bias.register_post_accumulate_grad_hook(drop),
}


@pytest.mark.parametrize("device", ["1GiB", "30KiB"])
@pytest.mark.parametrize("when", ["before", "between"])
@pytest.mark.parametrize("kind", HOOKS)
def test_hooks_have_the_effect_of_plain_pytorch(kind: str, when: str, device: str) -> None:
    torch.manual_seed(0)
    model = Net()
    plain, data = copy.deepcopy(model), batches()
    if when == "before":
        HOOKS[kind](model)
    engine = engine_of(model, memory=Memory(device=device))
    for batch in data[:2]:
        engine.step(batch)
    if when == "between":
        handle = HOOKS[kind](engine._run.model)
        engine.step(data[2])
        engine.step(data[3])
        handle.remove()
        engine.step(data[4])
        plainly(plain, data[:2])
        handle = HOOKS[kind](plain)
        plainly(plain, data[2:4])
        handle.remove()
        want = plainly(plain, data[4:])
    else:
        for batch in data[2:]:
            engine.step(batch)
        HOOKS[kind](plain)
        want = plainly(plain, data)
    got = engine.state_dict()
    assert all(torch.equal(got[name], value) for name, value in want.items())


def test_a_handle_from_before_the_engine_removes_the_hook() -> None:
    torch.manual_seed(0)
    model = Net()
    plain = copy.deepcopy(model)
    handles = [HOOKS["tensor"](model), HOOKS["post-accumulate"](model)]
    engine = engine_of(model)
    for handle in handles:
        handle.remove()
    engine.step(batches()[0])
    want = plainly(plain, batches()[:1])
    assert all(torch.equal(value, want[name]) for name, value in engine.state_dict().items())


def test_tensor_hooks_see_every_micro_batch() -> None:
    torch.manual_seed(0)
    model = Net()
    plain = copy.deepcopy(model)
    HOOKS["tensor"](model)
    HOOKS["tensor"](plain)
    engine = engine_of(model, micro_batches=2)
    for batch in batches():
        engine.step(batch)
    want = plainly(plain, batches(), parts=2)
    assert all(torch.equal(value, want[name]) for name, value in engine.state_dict().items())


def test_what_hooks_cannot_do_is_refused() -> None:
    model = Net()
    HOOKS["post-accumulate"](model)
    with pytest.raises(RunError, match=r"blocks\.1\.2\.weight has a post-accumulate hook.*micro_batches=1"):
        engine_of(model, micro_batches=2)
    engine = engine_of(Net(), micro_batches=2)
    with pytest.raises(RunError, match="post-accumulate hook"):
        HOOKS["post-accumulate"](engine._run.model)
    engine = engine_of(Net())
    engine._run.model.blocks[0][0].weight.register_post_accumulate_grad_hook(lambda p: p.data.zero_())
    before = engine.state_dict()
    with pytest.raises(RunError, match=r"changed the weight blocks\.0\.0\.weight itself"):
        engine.step(batches()[0])
    assert all(torch.equal(value, before[name]) for name, value in engine.state_dict().items())


def test_a_hook_that_holds_the_old_parameter_is_told() -> None:
    model = Net()
    weight = model.blocks[0][0].weight
    weight.register_hook(lambda gradient: gradient + 0.1 * weight)
    with pytest.raises(RunError, match=r"blocks\.0\.0\.weight: 'mul' has no values"):
        engine_of(model).step(batches()[0])


def test_torch_keeps_hooks_where_we_look() -> None:
    one, other, seen = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2)), []
    handle = one.register_hook(lambda g: seen.append("tensor"))
    assert post_accumulate_hooks(one) is None
    one.register_post_accumulate_grad_hook(lambda p: None)
    assert len(post_accumulate_hooks(one) or {}) == 1
    share_tensor_hooks(one)(other)
    other.sum().backward()
    assert seen == ["tensor"]
    handle.remove()
    other.sum().backward()
    assert seen == ["tensor"]


class Listed(nn.Module):
    """Reads its weights from lists and attributes of its own, as recurrent modules do."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.listed = [block.weight for block in self.blocks]
        self.named = {"bias": [self.blocks[0].bias]}
        self.rnn = nn.GRU(16, 16, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.listed:
            x = torch.tanh(x @ weight.T + self.named["bias"][0]) + self.rnn(x.unsqueeze(1))[0].squeeze(1)
        return (x + self.blocks[1].bias).square().mean()


def test_modules_that_keep_parameters_in_lists() -> None:
    torch.manual_seed(0)
    model = Listed()
    plain = copy.deepcopy(model)
    plain.listed = [block.weight for block in plain.blocks]
    engine = engine_of(model)
    for batch in batches():
        engine.step(batch)
    want = plainly(plain, batches())
    assert all(torch.equal(value, want[name]) for name, value in engine.state_dict().items())


def test_torch_keeps_weak_references_where_we_look() -> None:
    module = nn.LSTM(2, 2)
    assert len(getattr(module, RNN_REFERENCES)) == len(module._flat_weights)
