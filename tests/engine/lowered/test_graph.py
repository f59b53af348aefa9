"""The graph of a planned model: from the cache it gives the program of a fresh capture, and one rank captures for all."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import scrimp.planner
from scrimp import Engine, Plan, zoo
from scrimp.chunks import Wire
from scrimp.engine.lowered.graph import graph_of
from scrimp.errors import RunError
from scrimp.ext.ranks import pool
from scrimp.lower import digest, lower
from tests.engine.lowered.test_planned_steps import ROWS
from tests.lower.test_ranks import planned

NAMES = ["gpt-tiny", "llama-tiny", "bert-tiny", "vit-tiny", "resnet-tiny"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("SCRIMP_GRAPHS", "1")
    return tmp_path


def plan_of(name: str, mesh: str = "x=2", way: str = "zero-3") -> Plan:
    return Plan.from_json(planned(name, {}, mesh, way).to_json())


def found(plan: Plan, model: nn.Module) -> tuple[str, int]:
    """The digest of its program, and how often it was captured."""
    with mock.patch.object(scrimp.planner, "captured_for", wraps=scrimp.planner.captured_for) as captured:
        return digest(lower(plan, graph_of(plan, model, Wire()))), captured.call_count


@pytest.mark.parametrize("name", NAMES)
def test_a_cached_graph_gives_the_program_of_a_capture(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(name)
    cold = found(plan, zoo.build(name))
    warm = found(plan, zoo.build(name))
    monkeypatch.setenv("SCRIMP_GRAPHS", "0")
    assert cold == found(plan, zoo.build(name))
    assert [cold[1], warm[1]] == [1, 0]
    assert cold[0] == warm[0]


def test_another_model_is_captured() -> None:
    plan = plan_of("gpt-tiny")
    model = zoo.build("gpt-tiny")
    assert found(plan, model)[1] == 1
    model.get_submodule("blocks.0").eval()
    assert found(plan, model)[1] == 1


def test_a_plan_made_in_this_process_is_of_its_model_alone() -> None:
    plan = planned("gpt-tiny", {}, "x=1", "ddp")
    assert plan.source is not None
    with pytest.raises(RunError, match=r"operator 4 is aten.sum.dim_IntList in the plan and aten.native_dropout.default"):
        Engine(zoo.build("gpt-tiny", dropout=0.1), plan=plan, optimizer=plan.optimizer, precision=plan.precision, device="cpu")


def test_a_capture_that_warns_warns_at_every_start() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.calls = nn.Linear(4, 4), 0

        def forward(self, x: Any) -> Any:
            self.calls = self.calls + 1
            return self.inner(x).square().mean()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = scrimp.plan(Counting(), {"x": torch.zeros(4, 4)}, "1xCPU", precision="fp32", time_limit=1)
    plan = Plan.from_json(made.to_json())
    for _ in range(2):
        with pytest.warns(UserWarning, match="sets attributes"):
            graph_of(plan, Counting(), Wire())


@pytest.mark.full
def test_a_start_from_the_cache_does_not_load_torchs_compiler(tmp_path: Path) -> None:
    plan = plan_of("gpt-tiny", "x=1", "ddp")
    path = tmp_path / "plan.json"
    plan.save(path)
    code = (
        "import sys; from scrimp import Engine, Plan, zoo\n"
        f"plan = Plan.load({str(path)!r})\n"
        "engine = Engine(zoo.build('gpt-tiny'), plan=plan, optimizer=plan.optimizer, precision=plan.precision, device='cpu')\n"
        f"engine.step(*zoo.example_batch('gpt-tiny', {ROWS}))\n"
        "loaded = [name for name in ('torch._dynamo', 'torch._functorch.aot_autograd') if name in sys.modules]\n"
        "print(len(loaded))"
    )
    for loaded in (2, 0):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert int(done.stdout) == loaded


def run(folder: Path, **options: Any) -> tuple[list[int], set[float]]:
    text = plan_of("gpt-tiny").to_json()
    results = pool(2).run("tests.rank_jobs.planned_engine:start", text, "gpt-tiny", ROWS, str(folder), **options)
    return [count for count, _ in results], {loss for _, loss in results}


def test_one_rank_captures_for_all(folder: Path) -> None:
    first = run(folder)
    assert first[0] == [1, 0]
    assert run(folder) == ([0, 0], first[1])
    assert run(folder, switch="0") == ([1, 0], first[1])
    assert run(folder, stranger=1) == ([0, 1], first[1])
    assert run(folder, stranger=0) == ([0, 0], first[1])  # each has its own in the cache by now
    assert run(folder, hooked=True) == ([1, 1], first[1])
