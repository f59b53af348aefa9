"""Which steps the meter looks at: those that are new, and now and then one of those that are not; all of them where a step may
take more than the one before."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

from scrimp.chunks.meter.cpu import CpuMeter
from scrimp.chunks.store.placement import DEVICE
from scrimp.engine import Engine
from scrimp.engine.schedule.metering_policy import ALIKE, EVERY
from tests.engine.test_engine import adamw, assert_same, engine_for, everything
from tests.support.reference import train_fp32

FIRST = 3  # steps at most until there is a schedule


class Watch:
    """Counts the operators that the meter is shown."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._operators = 0
        shown = CpuMeter.__torch_dispatch__

        def count(meter: CpuMeter, *args: Any, **kwargs: Any) -> Any:
            self._operators += 1
            return shown(meter, *args, **kwargs)

        monkeypatch.setattr(CpuMeter, "__torch_dispatch__", count)

    def step(self, engine: Engine, *batch: Any) -> bool:
        """Whether it was looked at."""
        before = self._operators
        engine.step(*batch)
        return self._operators > before

    def until_alike(self, engine: Engine, *batch: Any) -> None:
        for _ in range(FIRST + ALIKE):
            if not self.step(engine, *batch):
                return
        raise AssertionError("all steps were looked at")


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    return Watch(monkeypatch)


class Net(nn.Module):
    """Goes through its layers in the order that the last element of the batch says; and may keep more than it seems."""

    def __init__(self, more: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)
        self.more = more

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layers = (self.a, self.b) if x[-1, -1] > 0 else (self.b, self.a)
        for layer in layers:
            x = layer(x).relu()
        if self.more:
            x = x + torch.ones(self.more).exp().mean()
            self.more += 1
        return x.square().mean()


def batch(way: float = 1.0) -> torch.Tensor:
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(1))
    x[-1, -1] = way
    return x


def test_steps_that_are_alike_are_looked_at_now_and_then(watch: Watch) -> None:
    engine = engine_for(Net(), precision="fp32")
    watch.until_alike(engine, batch())
    rest = [watch.step(engine, batch()) for _ in range(3 * EVERY)]
    assert sum(rest) == 3
    assert rest.index(True) == EVERY - 2  # one was made before


def test_a_peak_that_was_reset_is_found_again(watch: Watch) -> None:
    engine = engine_for(Net(), precision="fp32")
    watch.until_alike(engine, batch())
    engine.ledger.reset_peak()
    assert watch.step(engine, batch())
    peak = engine.ledger.peak_nbytes
    assert not watch.step(engine, batch())
    engine.ledger.reset_peak()
    assert watch.step(engine, batch())
    assert engine.ledger.peak_nbytes == peak


def test_nothing_is_left_in_the_books_by_steps_that_nobody_looked_at(watch: Watch) -> None:
    engine = engine_for(Net(), precision="fp32")
    watch.until_alike(engine, batch())
    now = engine.ledger.device.now.copy()
    for _ in range(2 * EVERY):
        watch.step(engine, batch())
    assert engine.ledger.device.now == now


def test_a_new_shape_is_looked_at_and_the_old_one_still_known(watch: Watch) -> None:
    engine = engine_for(Net(), precision="fp32")
    watch.until_alike(engine, batch())
    larger = batch().repeat(2, 1)
    assert watch.step(engine, larger)
    watch.until_alike(engine, larger)
    assert not watch.step(engine, batch())


def test_steps_that_take_more_each_time_are_all_looked_at(watch: Watch) -> None:
    engine = engine_for(Net(more=10_000), precision="fp32")
    assert all(watch.step(engine, batch()) for _ in range(FIRST + 2 * ALIKE))


def test_a_step_that_goes_another_way_with_nobody_looking(watch: Watch) -> None:
    engine = engine_for(Net(), precision="fp32")
    engine._run.planning._on_device = frozenset()  # layers come and go
    watch.until_alike(engine, batch())
    traced = engine._run.planning.current
    assert traced is not None
    choice = traced.choice
    assert not watch.step(engine, batch(-1.0))
    assert traced.choice is choice  # nothing was learned from what nobody saw
    assert watch.step(engine, batch(-1.0))
    assert traced.choice is not choice
    ways = [1.0] * (engine.optimizer.steps - 2) + [-1.0] * 2
    want, _ = train_fp32(Net(), [(batch(way),) for way in ways], adamw)
    assert_same(everything(engine), want)


def test_where_no_layer_moves_the_way_makes_no_difference(watch: Watch) -> None:
    engine = engine_for(Net(), precision="fp32")
    watch.until_alike(engine, batch())
    assert all(placement.tier == DEVICE for placement in engine._run.store.placements if placement.weights.numel())
    looked, ways = [], [1.0] * engine.optimizer.steps
    for _ in range(EVERY):
        ways += [-1.0]
        looked.append(watch.step(engine, batch(-1.0)))
    assert sum(looked) > 1  # the one that was different, and those after it
    want, _ = train_fp32(Net(), [(batch(way),) for way in ways], adamw)
    assert_same(everything(engine), want)
    engine.evaluate(batch())  # where layers are asked for as ever
    assert not engine._run.residents.active


def test_training_does_not_load_torchs_compiler() -> None:
    """Which takes seconds, and which a mode of torch's own making would do at the first operator."""
    code = (
        "import sys, torch\n"
        "from scrimp import Engine, Memory\n"
        "engine = Engine(torch.nn.Linear(4, 4), memory=Memory(device='64MiB'), loss=torch.sum, device='cpu')\n"
        "before = 'torch._dynamo' in sys.modules\n"
        "engine.step(torch.ones(2, 4))\n"
        "print(before, 'torch._dynamo' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.split() == ["False", "False"]
