"""A layer that is recomputed sees the buffers and the inputs that its first forward saw."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from scrimp import SGD, Engine, FitError, Memory
from tests.engine.step.test_parameter_hooks import plainly as trained_plainly


class Averaging(nn.Module):
    """Multiplies by a moving average that this very forward moves; `how` says by what kind of write."""

    def __init__(self, dim: int, how: str) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, dim)
        self.how = how
        self.register_buffer("scale", torch.ones(dim))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            new = x.abs().mean(0)
            if self.how == "in place":
                self.scale.mul_(0.9).add_(0.1 * new)
            elif self.how == "data":
                self.scale.data.mul_(0.9).add_(0.1 * new)
            else:
                self.scale = 0.9 * self.scale + 0.1 * new
            self.calls += 1
        return x + torch.tanh(self.linear(x) * self.scale)


class Spectral(nn.Module):
    def __init__(self, dim: int, how: str) -> None:
        super().__init__()
        self.linear = parametrizations.spectral_norm(nn.Linear(dim, dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x))


class Net(nn.Module):
    def __init__(self, block: type[nn.Module] = Averaging, how: str = "in place", *, dim: int = 16, uses: int = 1) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block(dim, how) for _ in range(3))
        self.head = nn.Linear(dim, 1)
        self.uses = uses

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            for _ in range(self.uses):
                x = block(x)
        return self.head(x).square().mean()


def batches(count: int = 6, dim: int = 16) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(8, dim, generator=draw) for _ in range(count)]


def plainly(model: nn.Module, data: list[torch.Tensor], parts: int = 1) -> dict[str, torch.Tensor]:
    return trained_plainly(copy.deepcopy(model), data, parts)


def assert_same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert torch.equal(got[name], value), name


def engine_of(model: nn.Module, **settings: Any) -> Engine:
    settings = {"memory": Memory(device="1GiB"), "precision": "fp32", "device": "cpu", "optimizer": SGD(lr=0.05), **settings}
    return Engine(copy.deepcopy(model), **settings)


@pytest.mark.parametrize("recompute", ["auto", "recompute,offload", "keep"])
@pytest.mark.parametrize("how", ["in place", "data", "replaced", "spectral_norm"])
def test_buffers_that_forward_updates_and_uses(how: str, recompute: str) -> None:
    torch.manual_seed(0)
    model = Net(Spectral if how == "spectral_norm" else Averaging, how)
    engine = engine_of(model, activations=recompute)
    for batch in batches():
        engine.step(batch)
    assert_same(engine.state_dict(), plainly(model, batches()))


@pytest.mark.parametrize(("parts", "uses"), [(2, 1), (1, 2), (2, 2)])
def test_several_micro_batches_and_uses_of_a_layer(parts: int, uses: int) -> None:
    torch.manual_seed(0)
    model = Net(how="in place" if uses == 1 else "replaced", uses=uses)
    engine = engine_of(model, activations="recompute,offload", micro_batches=parts)
    for batch in batches():
        engine.step(batch)
    assert_same(engine.state_dict(), plainly(model, batches(), parts))


def test_inputs_offloaded_to_the_host_and_retries() -> None:
    torch.manual_seed(0)
    model = Net(dim=64)
    data = [batch.repeat(32, 1) for batch in batches(4, 64)]
    want = plainly(model, data)
    seen = set()
    for kib in range(1200, 160, -40):
        engine = engine_of(model, memory=Memory(device=f"{kib}KiB"))
        try:
            for batch in data:
                engine.step(batch)
        except FitError:
            break
        seen.add((engine._run.recompute.offloaded, bool(engine._run.recompute.again)))
        assert_same(engine.state_dict(), want)
    assert {(False, True), (True, True)} <= seen, seen


class LargeLate(nn.Module):
    """A buffer of 1 MiB that is written from the fifth forward on, after all tracing steps."""

    def __init__(self, dim: int, how: str) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, dim)
        self.how = how
        self.calls = 0
        self.register_buffer("queue", torch.ones(1 << 18))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch._C._current_graph_task_id() == -1:  # not in a recomputation
            self.calls += 1
        if self.calls > 4:
            with torch.no_grad():
                if self.how == "replaced":
                    self.queue = self.queue * 0.5
                else:
                    self.queue.mul_(0.5)
        return x + torch.tanh(self.linear(x) * self.queue[: x.shape[1]])


@pytest.mark.parametrize("how", ["in place", "replaced"])
def test_a_large_buffer_that_changes_late(how: str) -> None:
    torch.manual_seed(0)
    model = Net(LargeLate, how)
    engine = engine_of(model, activations="recompute,offload")
    for batch in batches(8):
        for block in engine._run.model.blocks:  # a retry must not count twice
            block.calls = engine.optimizer.steps
        engine.step(batch)
    plain = copy.deepcopy(model)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05, fused=True)
    for step, batch in enumerate(batches(8)):
        for block in plain.blocks:
            block.calls = step
        plain(batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_same(engine.state_dict(), plain.state_dict())


class InPlace(nn.Module):
    """Changes its input, or lets the model change it afterwards."""

    def __init__(self, dim: int, how: str) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, dim)
        self.how = how

    def forward(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        if self.how == "itself":
            bias += 1
        return x + torch.tanh(self.linear(x) + bias)


class Changing(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(InPlace(16, how) for _ in range(3))
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = torch.zeros(16)
        for block in self.blocks:
            x = block(x, bias)
            if self.how == "model":
                bias += 1
        return x.square().mean()


@pytest.mark.parametrize("how", ["itself", "model"])
def test_inputs_that_are_changed_in_place_are_not_recomputed_from(how: str) -> None:
    torch.manual_seed(0)
    model = Changing(how)
    engine = engine_of(model)
    for batch in batches():
        engine.step(batch)
    assert_same(engine.state_dict(), plainly(model, batches()))
    engine = engine_of(model, activations="recompute,offload")
    with pytest.warns(UserWarning, match=r"layer 'blocks\.\d'.*in place.*keeps its activations"):
        engine.step(batches()[0])
    for batch in batches()[1:]:
        engine.step(batch)
    assert_same(engine.state_dict(), plainly(model, batches()))
