"""Operators without a rule: they are planned, kept whole, and it is said what that costs and what can be done."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from scrimp import Plan, PlanWarning, plan
from scrimp.rules import discover, learn
from scrimp.rules.ops import registry as knowing
from scrimp.rules.proof.synthetic_calls import example
from tests.cli.test_cli import _plain_wide_output, scrimp

__all__ = ["_plain_wide_output"]  # a fixture, for every test here

ROWS, WIDTH, LAYERS, DEVICES = 8192, 1024, 3, 8  # large enough that bytes count, and not messages
OP = "scrimp_whole_test.twist.default"


@torch.library.custom_op("scrimp_whole_test::twist", mutates_args=())
def twist(x: Tensor) -> Tensor:
    return x.flip(-1).contiguous()


@twist.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


twist.register_autograd(lambda ctx, gradient: twist(gradient.contiguous()))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(twist(torch.relu(self.up(x))))


class Twisted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def planned(**others: Any) -> Plan:
    settings = {"mesh": f"x={DEVICES}", "activations": ("keep",), "time_limit": 30, **others}
    with torch.device("meta"):
        return plan(Twisted(), (torch.zeros(ROWS, WIDTH),), f"{DEVICES}xA100-80", **settings)


def unruled(**others: Any) -> tuple[Plan, list[str]]:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = planned(**others)
    assert all(each.category is PlanWarning for each in told)
    return found, [str(each.message) for each in told]


def test_it_is_planned_and_told_with_what_it_costs() -> None:
    found, told = unruled()
    (kept,) = found.whole
    # It reads as much as it makes, in bf16; of that an eighth is a device's own.
    assert kept.redundant_nbytes == 2 * 2 * ROWS * 2 * WIDTH * (DEVICES - 1) // DEVICES
    assert (kept.target, kept.times) == (OP, 2 * LAYERS)  # forward and backward
    assert kept.seconds > 0
    (words,) = told
    assert words == str(kept)
    assert re.fullmatch(
        rf"{re.escape(OP)} \(blocks\.0, answers/test_unsharded_ops\.py:\d+ and 5 more\) has no rule, so every device runs all "
        rf"of it: "
        rf"while it runs a device holds 56\.0 MiB of replicated data, and a step is [\d.e-]+ ms longer; "
        rf"`scrimp rules discover {re.escape(OP)}` may find a rule",
        words,
    )
    assert words in found.summary()
    ops = [op for layers in found.layers for op in layers.ops if op.target == OP]
    assert len(ops) == 2 * LAYERS
    assert all("x" not in layout for op in ops for layout in (*op.inputs, *op.outputs) if layout is not None)
    assert Plan.from_json(found.to_json()) == found


def test_seconds_are_those_that_a_rule_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fastest plans with and without, counted by the solver: what is told is near the difference, and bytes are fewer."""
    fast, _ = unruled(objective="time")
    least, _ = unruled()
    monkeypatch.setattr(knowing, "_RULES", dict(knowing._RULES))
    line = discover(*example(OP))
    assert line == f'"{OP}": "a w0 -> a w1; whole w0 w1; linear 0",'
    assert learn(line) == OP
    ruled, told = unruled(objective="time")
    assert (ruled.whole, told) == ((), [])
    saved = fast.seconds - ruled.seconds
    assert 0.5 * saved <= sum(kept.seconds for kept in fast.whole) <= 2 * saved
    assert planned().memory.peak_nbytes < least.memory.peak_nbytes


class Gated(nn.Module):
    """With an operator of torch itself that has no rule."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.glu(self.first(x))).mean()


def test_operators_of_torch_without_a_rule() -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = plan(Gated(), (torch.zeros(ROWS, WIDTH),), "8xA100-80", mesh="x=2,y=4", activations=("keep",))
    for each, target in zip(told, ("glu", "glu_backward"), strict=True):
        assert re.match(
            rf"aten\.{target}\.default \(the model, answers/test_unsharded_ops\.py:\d+\) has no rule", str(each.message)
        )
    assert [kept.target for kept in found.whole] == ["aten.glu.default", "aten.glu_backward.default"]
    assert found.memory.peak_nbytes > found.memory.floor_nbytes


def test_the_command_line_tells_it_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["import torch", "from tests.planner.answers.test_unsharded_ops import Gated, ROWS, WIDTH", "", "def made():"]
    (tmp_path / "gated_model.py").write_text("\n".join([*lines, "    return Gated(), (torch.zeros(ROWS, WIDTH),)", ""]))
    monkeypatch.chdir(tmp_path)
    told = scrimp("plan", "gated_model:made", "--cluster", "8xA100-80", "--mesh", "x=8", "--keep")
    assert [line.partition(" (")[0] for line in told.stderr.splitlines()] == [
        "warning: aten.glu.default",
        "warning: aten.glu_backward.default",
    ]
    assert "`scrimp rules discover aten.glu.default` may find a rule" in told.stdout
