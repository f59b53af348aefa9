"""Learning rates that change: torch's schedulers on `engine.optimizer`, `engine.lr`, groups in torch's form."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import run
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedulers

from scrimp import zoo
from scrimp.chunks.tables.optimizers import SGD, AdamW
from scrimp.engine import Engine, Memory
from scrimp.errors import RunError
from scrimp.exchange import Sparse
from scrimp.ext.ranks import pool

STEPS = 8
Scheduler = Callable[[torch.optim.Optimizer], Any]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def batch(step: int) -> torch.Tensor:
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(step))


def engine_for(optimizer: Any, model: nn.Module | None = None, **settings: Any) -> Engine:
    chosen = {"memory": Memory(device="1GiB"), "device": "cpu", "precision": "fp32", **settings}
    return Engine(model or net(), optimizer=optimizer, **chosen)


def plain(make: Callable[[nn.Module], torch.optim.Optimizer], scheduler: Scheduler) -> tuple[dict[str, torch.Tensor], list[Any]]:
    model, rates = net(), []
    optimizer = make(model)
    schedule = scheduler(optimizer)
    for step in range(STEPS):
        loss = model(batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        rates.append([group["lr"] for group in optimizer.param_groups])
        advance(schedule, loss.detach())
    return model.state_dict(), rates


def ours(engine: Engine, scheduler: Scheduler) -> tuple[dict[str, torch.Tensor], list[Any]]:
    rates = []
    schedule = scheduler(engine.optimizer)
    for step in range(STEPS):
        loss = engine.step(batch(step))
        rates.append([group["lr"] for group in engine.optimizer.param_groups])
        advance(schedule, loss)
    return engine.state_dict(), rates


def advance(schedule: Any, loss: torch.Tensor) -> None:
    schedule.step(loss) if isinstance(schedule, schedulers.ReduceLROnPlateau) else schedule.step()


def same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert [name for name in want if not torch.equal(got[name], want[name])] == []


def hugging(name: str, *args: int) -> Scheduler:
    def make(optimizer: torch.optim.Optimizer) -> Any:
        transformers = pytest.importorskip("transformers")
        return getattr(transformers, name)(optimizer, *args)

    return make


def two(optimizer: torch.optim.Optimizer, kind: Any, **more: Any) -> Any:
    rows = [schedulers.ConstantLR(optimizer, 0.1, total_iters=3), schedulers.ExponentialLR(optimizer, 0.9)]
    return kind(optimizer, rows, **more) if kind is schedulers.SequentialLR else kind(rows)


SCHEDULERS: dict[str, Scheduler] = {
    "lambda": lambda o: schedulers.LambdaLR(o, lambda step: 1 / (1 + step)),
    "multiplicative": lambda o: schedulers.MultiplicativeLR(o, lambda step: 0.9),
    "step": lambda o: schedulers.StepLR(o, 2),
    "multi-step": lambda o: schedulers.MultiStepLR(o, [2, 5]),
    "linear": lambda o: schedulers.LinearLR(o, total_iters=4),
    "polynomial": lambda o: schedulers.PolynomialLR(o, total_iters=6),
    "cosine": lambda o: schedulers.CosineAnnealingLR(o, STEPS),
    "restarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 3),
    "one-cycle": lambda o: schedulers.OneCycleLR(o, 1e-2, total_steps=STEPS + 1),
    "cyclic": lambda o: schedulers.CyclicLR(o, 1e-4, 1e-2, step_size_up=3),
    "plateau": lambda o: schedulers.ReduceLROnPlateau(o, patience=0, threshold=1.0),
    "sequential": lambda o: two(o, schedulers.SequentialLR, milestones=[4]),
    "chained": lambda o: two(o, schedulers.ChainedScheduler),
    "swa": lambda o: torch.optim.swa_utils.SWALR(o, 0.05, anneal_epochs=4),
    "hf-linear": hugging("get_linear_schedule_with_warmup", 2, STEPS),
    "hf-cosine": hugging("get_cosine_schedule_with_warmup", 2, STEPS),
    "hf-constant": hugging("get_constant_schedule_with_warmup", 2),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_of_torch_give_the_numbers_of_plain_pytorch(name: str) -> None:
    """With betas and momentum where they change those; warnings are errors here."""
    want, rates = plain(lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True), SCHEDULERS[name])
    got, mine = ours(engine_for(AdamW(lr=1e-2)), SCHEDULERS[name])
    same(got, want)
    assert mine == rates
    assert len({*map(tuple, rates)}) > 1


@pytest.mark.parametrize("name", ["one-cycle", "cyclic", "cosine"])
def test_sgd_with_momentum_that_changes(name: str) -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, fused=True)

    want, _ = plain(make, SCHEDULERS[name])
    same(ours(engine_for(SGD(lr=1e-2, momentum=0.9)), SCHEDULERS[name])[0], want)


@pytest.mark.parametrize("where", ["disk", "micro_batches", "clip", "fast", "sparse"])
def test_a_rate_that_is_set_counts_for_the_steps_that_follow(where: str, tmp_path: Path) -> None:
    """Updates run beside the next step: one that was submitted keeps its rate. Each way against numbers set from the start."""
    settings: dict[str, Any] = {
        "disk": {"memory": Memory(device="1GiB", host="160KiB", disk=tmp_path), "precision": "bf16"},
        "micro_batches": {"micro_batches": 5},
        "clip": {"clip_norm": 0.1, "precision": "bf16"},
        "fast": {"skip_nonfinite": False, "precision": "bf16"},
        "sparse": {"exchange": Sparse(density=0.2, small=0)},
    }[where]
    rates = [10.0 ** -(1 + step % 3) for step in range(STEPS)]
    on_disk = where == "disk"
    model = zoo.build("gpt-tiny") if on_disk else net()
    engine, other = (engine_for(SGD(lr=lr), copy.deepcopy(model), **settings) for lr in (1.0, lambda step: rates[step]))
    assert any(placement.file is not None for placement in engine._run.store.placements) == on_disk
    for step in range(STEPS):
        rows = zoo.example_batch("gpt-tiny", batch=2, step=step) if on_disk else (batch(step),)
        engine.lr = rates[step]
        engine.step(*rows)
        engine.lr = 100.0  # at once: nothing of the step may see it
        other.step(*rows)
    same(engine.state_dict(), other.state_dict())
    assert all(value.isfinite().all() for value in engine.state_dict().values())


def test_lr_is_read_and_set() -> None:
    engine = engine_for(AdamW(lr=1e-2))
    assert engine.lr == 1e-2
    engine.lr = 3e-3
    assert engine.optimizer.param_groups[0]["lr"] == engine.lr == 3e-3
    engine.lr = float("nan")
    with pytest.raises(RunError, match="learning rate of step 0 is nan"):
        engine.step(batch(0))
    engine.lr = 1e-3
    engine.step(batch(0))
    several = engine_for(AdamW(lr=1e-2, groups=[("*bias", {"lr": 1e-3})]))
    assert several.lr == [1e-2, 1e-3]
    several.lr = 1e-4
    assert several.lr == [1e-4, 1e-4]
    several.lr = [1e-4, 1e-5]
    assert several.lr == [1e-4, 1e-5]
    with pytest.raises(RunError, match="3 values, and there are 2 groups"):
        several.lr = [1, 2, 3]


def test_a_function_and_a_scheduler_do_not_mix() -> None:
    engine = engine_for(AdamW(lr=lambda step: 1e-2 / (1 + step)))
    engine.step(batch(0))
    assert engine.lr == 5e-3
    words = "lr is a function of the step.*give a number"
    for act in (lambda: setattr(engine, "lr", 1e-3), lambda: schedulers.StepLR(engine.optimizer, 1)):
        with pytest.raises(RunError, match=words):
            act()
    engine.step(batch(1))
    assert engine.lr == pytest.approx(1e-2 / 3)


@pytest.mark.parametrize("call", ["step", "zero_grad", "state_dict"])
def test_the_handle_does_nothing_silently(call: str) -> None:
    engine = engine_for(AdamW())
    schedulers.StepLR(engine.optimizer, 2)  # which puts its own `step` there
    with pytest.raises(RunError, match=rf"engine\.optimizer\.{call}\(\): the engine"):
        getattr(engine.optimizer, call)()
    with pytest.raises(RunError, match="build a new Engine"):
        engine.optimizer.add_param_group({"params": []})
    with pytest.raises(RunError, match="are not called"):
        engine.optimizer.register_step_post_hook(print)
    assert engine.optimizer.settings == AdamW()
    assert sum(p.numel() for p in engine.optimizer.param_groups[0]["params"]) == sum(p.numel() for p in net().parameters())


def test_settings_that_cannot_change_are_refused() -> None:
    engine = engine_for(SGD(lr=0.1))
    engine.optimizer.param_groups[0]["momentum"] = 0.9
    with pytest.raises(RunError, match=r"param_groups\[0\]\['momentum'\] is 0.9.*SGD\(momentum"):
        engine.step(batch(0))
    engine.optimizer.param_groups[0].update(momentum=0.0, nesterov=True)
    with pytest.raises(RunError, match="nesterov"):
        engine.step(batch(0))
    engine.optimizer.param_groups[0].update(nesterov=False, weight_decay=-1)
    with pytest.raises(RunError, match=r"step 0, param_groups\[0\]: SGD\(weight_decay=-1\)"):
        engine.step(batch(0))
    engine.optimizer.param_groups[0]["weight_decay"] = 0.1
    engine.step(batch(0))


def groups_of(model: nn.Module, names: bool = False) -> list[dict[str, Any]]:
    rows = dict(model.named_parameters())
    bias = [name if names else parameter for name, parameter in rows.items() if "bias" in name]
    rest = [name if names else parameter for name, parameter in rows.items() if "bias" not in name]
    return [{"params": rest, "weight_decay": 0.3}, {"params": bias, "lr": 3e-2}]


@pytest.mark.parametrize("names", [False, True])
def test_groups_in_torchs_form(names: bool) -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(groups_of(model), lr=1e-2, fused=True)

    model = net()
    want, rates = plain(make, SCHEDULERS["cosine"])
    got, mine = ours(engine_for(AdamW(groups_of(model, names), lr=1e-2), model), SCHEDULERS["cosine"])
    same(got, want)
    assert mine == rates


def test_other_forms_of_groups() -> None:
    want, _ = plain(lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True), SCHEDULERS["step"])
    for form in (lambda model: model.parameters(), lambda model: model.named_parameters(), lambda _: [{"params": "*"}]):
        model = net()
        same(ours(engine_for(AdamW(form(model), lr=1e-2), model), SCHEDULERS["step"])[0], want)


def test_groups_that_are_wrong() -> None:
    model = net()
    weights = [*model.parameters()]
    cases = [
        ([{"params": weights[1:]}], "1 trained parameters are in no group, such as layers.0.weight"),
        ([{"params": weights}, {"params": weights[:1]}], "layers.0.weight is in the groups 0 and 1"),
        ([{"params": "*"}, {"params": "*bias"}], r"layers.0.bias is in the groups \[0, 1\]"),
        ([{"params": [*weights, nn.Parameter(torch.ones(3))]}], r"shape \(3,\) that is no parameter of this model"),
        ([{"params": weights, "momentum": 1}], r"group 0 overrides \['momentum'\]"),
        ([{"lr": 1}], r'no "params"'),
        ([3], "is a int"),
        ([{"params": weights}, ("*", {})], "not both"),
    ]
    with pytest.raises(RunError, match=r"first argument is 0\.001.*or lr="):
        AdamW(1e-3)
    for groups, words in cases:
        with pytest.raises(RunError, match=words):
            engine_for(AdamW(groups), model)


def test_rates_and_schedulers_go_on_after_a_checkpoint(tmp_path: Path) -> None:
    """The engine's checkpoint has what torch's optimizer state dict has of the groups; a scheduler's state is the user's."""
    whole = engine_for(AdamW(lr=1e-2))
    want, rates = ours(whole, SCHEDULERS["one-cycle"])
    first = engine_for(AdamW(lr=1e-2))
    schedule = SCHEDULERS["one-cycle"](first.optimizer)
    for step in range(4):
        first.step(batch(step))
        schedule.step()
    first.save(tmp_path / "checkpoint")
    state = copy.deepcopy(schedule.state_dict())
    second = engine_for(AdamW(lr=1e-2))
    schedule = SCHEDULERS["one-cycle"](second.optimizer)
    second.load(tmp_path / "checkpoint")
    schedule.load_state_dict(state)
    assert second.lr == first.lr == rates[4][0]
    assert second.optimizer.param_groups[0]["betas"] == first.optimizer.param_groups[0]["betas"]
    assert second.optimizer.param_groups[0]["initial_lr"] == first.optimizer.param_groups[0]["initial_lr"]
    for step in range(4, STEPS):
        second.step(batch(step))
        schedule.step()
    same(second.state_dict(), want)
    other = engine_for(AdamW(lr=1e-2, groups=[("*bias", {"lr": 1e-3})]))
    with pytest.warns(UserWarning, match="has 1 groups of parameters, the engine has 2"):
        other.load(tmp_path / "checkpoint")
    assert other.lr == [1e-2, 1e-3]


def differing(setting: str) -> str:
    import torch.distributed as dist

    engine = engine_for(SGD(lr=0.1))
    engine.step(batch(0))
    if dist.get_rank() == 1 and setting == "lr":
        engine.lr = 0.2
    try:
        engine.step(batch(0))
    except RunError as error:
        return str(error)
    return ""


def test_ranks_with_other_rates_are_told() -> None:
    for text in pool(2).run(differing, "lr"):
        assert "rank 1 has another learning rate than rank 0" in text
    assert pool(2).run(differing, "none") == ["", ""]


def test_neither_the_handle_nor_a_scheduler_loads_a_compiler() -> None:
    code = (
        "import sys, torch; from scrimp import *; from torch.optim.lr_scheduler import StepLR\n"
        "e = Engine(torch.nn.Linear(2, 1), memory=Memory(device='1GiB'), device='cpu', loss=torch.mean)\n"
        "s = StepLR(e.optimizer, 1)\nfor _ in range(2): e.step(torch.ones(2, 2)); s.step()\n"
        "assert 'torch._dynamo' not in sys.modules\n"
    )
    code = code.replace("from scrimp import *", "from scrimp import Engine, Memory")
    assert run([sys.executable, "-c", code], cwd=Path(__file__).parents[3], capture_output=True).returncode == 0
