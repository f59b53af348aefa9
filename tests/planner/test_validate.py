"""What cannot be planned: one message that says what, where and what to do, from Python and from the command line."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from scrimp import CaptureError, Cluster, FitError, Mesh, Plan, PlanError, PlanWarning, ScrimpError, plan, zoo
from tests.cli.test_cli import _plain_wide_output, scrimp

__all__ = ["_plain_wide_output"]  # a fixture, for every test here

X = torch.zeros(8, 16)


class Net(nn.Module):
    """Whatever the function makes of it; by itself a loss."""

    def __init__(self, function: Callable[[Net, Tensor], Any] | None = None) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.inner = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
        self.function = function or good

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def good(net: Net, x: Tensor) -> Tensor:
    return net.inner(net.first(x)).square().mean()


def narrow(net: Net, x: Tensor) -> Tensor:
    return net.inner(net.first(x)[:, :8]).mean()


def other_sizes(net: Net, x: Tensor) -> Tensor:
    return (net.first(x) @ torch.ones(3, 4)).mean()


def own_words(net: Net, x: Tensor) -> Tensor:
    raise ValueError(f"{x.shape[1]} features, but 17 are wanted")


def asserts(net: Net, x: Tensor) -> Tensor:
    assert x.shape[0] == 9, "nine rows"
    return net.first(x).mean()


def branches(net: Net, x: Tensor) -> Tensor:
    y = net.first(x)
    return y.mean() if y.sum() > 0 else y.sum()


def loops(net: Net, x: Tensor) -> Tensor:
    y = net.first(x)
    while y.norm() > 1:
        y = y / 2
    return y.mean()


def no_loss(net: Net, x: Tensor) -> Tensor:
    return net.first(x)


def detached(net: Net, x: Tensor) -> Tensor:
    return net.first(x).mean().detach()


def source(function: Callable[[Net, Tensor], Any] = good, inputs: Any = (X,), cluster: Any = "8xH100", **others: Any) -> Plan:
    return plan(Net(function), inputs, cluster, **{"mesh": "x=8", "time_limit": 20, "activations": ("keep",), **others})


HERE = r"planner/test_validate\.py:\d+"
WAY_OUT = r".*run Engine without a plan"


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (narrow, rf"^inner\.0, {HERE}: the forward fails on this batch \(.*\[8, 8\].*\[16, 32\].*\); the batch is x \(8, 16\)"),
        (other_sizes, rf"^the model, {HERE}: the forward fails on this batch \(.*\[8, 16\].*\[3, 4\].*\); the batch is x"),
        (own_words, rf"^the model, {HERE}: the forward fails on this batch \(16 features, but 17 are wanted\)"),
        (asserts, rf"^the model, {HERE}: the forward fails on this batch \(nine rows\); the batch is x \(8, 16\) bfloat16$"),
        (branches, rf"^the model, {HERE}: the forward depends on the values of tensors.*branching" + WAY_OUT),
        (loops, rf"^the model, {HERE}: the forward depends on the values of tensors" + WAY_OUT),
        (no_loss, r"^Net must return a scalar loss .* but gave a tensor of shape \(8, 16\): are the labels in the batch\?"),
        (detached, r"^Net must return a loss that depends on its parameters, but gave one that depends on none: are all of them"),
    ],
)  # fmt: skip
def test_a_model_that_does_not_go_with_its_batch(function: Callable[[Net, Tensor], Any], says: str) -> None:
    with pytest.raises(CaptureError, match=says):
        source(function)


@pytest.mark.parametrize(
    ("inputs", "says"),
    [
        ((), r"Net\.forward takes x, and not this batch \(missing a required argument: 'x'\); the batch is empty"),
        ((X, X), r"Net\.forward takes x, and not this batch \(too many positional arguments\); the batch is x \(8, 16\)"),
        ({"y": X}, r"Net\.forward takes x, and not this batch \(.*'[xy]'.*\); the batch is y \(8, 16\)"),
        ((3,), rf"first, {HERE}: the forward fails on this batch \(linear\(\): argument 'input' .* must be Tensor, not int\)"),
    ],
)
def test_a_batch_that_the_forward_does_not_take(inputs: Any, says: str) -> None:
    with pytest.raises(CaptureError, match=says):
        source(inputs=inputs)


@pytest.mark.parametrize(
    ("others", "says"),
    [
        ({"inputs": X}, r"example_inputs is a tensor of shape \(8, 16\): give .* as a tuple, \(tensor,\)"),
        ({"inputs": "tokens"}, r"example_inputs must be a tuple .* not str"),
        ({"inputs": None}, r"example_inputs must be a tuple .* not NoneType"),
        ({"inputs": (X[:0],)}, r"a tensor of shape \(0, 16\), which is empty"),
        ({"cluster": None}, r"cluster must be a Cluster or the name of a preset.* not NoneType"),
        ({"mesh": 8}, r"mesh=8: give a Mesh, or a text such as 'x=2,y=4'"),
        ({"mesh": " "}, r"mesh=' ': give a Mesh, or a text such as 'x=2,y=4'"),
        ({"precision": "bf61"}, r"precision='bf61': there are bf16, megatron-bf16, fp32; did you mean 'bf16'\?"),
        ({"precision": ["bf16"]}, r"precision=\['bf16'\]: there are bf16, megatron-bf16, fp32$"),
        ({"optimizer": "adam"}, r"optimizer='adam': there are adamw, sgd; did you mean 'adamw'\?"),
        ({"objective": "memroy"}, r"objective='memroy': there are memory, time, redundancy; did you mean 'memory'\?"),
        ({"activations": "some"}, r"activations='some': give 'auto', or some of keep, recompute, offload"),
        ({"activations": ("recompute",)}, r"activations=\('recompute',\): 'keep' must be one of them"),
        ({"activations": ("keep", "drop")}, r"activations=\('keep', 'drop'\)"),
        ({"activations": None}, r"activations=None"),
        ({"time_limit": -1}, r"time_limit=-1, gap=0\.01: time_limit is 0 seconds or more"),
        (
            {"mesh": "x=4"},
            r"x=4 has 4 devices, and the cluster 8: the other 4 would be idle\. Give .* \(x=8\), or .* of 4 devices",
        ),
        ({"gap": 1}, r"gap=1: .* gap from 0 to less than 1"),
        ({"gap": float("nan")}, r"gap=nan"),
        ({"memory": 0}, r"memory=0: give a size"),
        ({"budget": "1GiB"}, r"no argument 'budget' any more: write memory="),
        ({"saving": ("keep",)}, r"no argument 'saving' any more: write activations="),
        ({"seconds": 5}, r"no argument 'seconds' any more: write time_limit="),
    ],
)
def test_a_question_that_makes_no_sense(others: dict[str, Any], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        source(**others)


@pytest.mark.parametrize(
    ("others", "says"),
    [
        ({"cluster": "8xH1000"}, r"cluster '8xH1000'.*kinds are .*; did you mean 8xH100"),
        ({"cluster": "8xA100"}, r"cluster '8xA100'.*did you mean 8xA100-[48]0 or 8xA100-[48]0"),
        ({"cluster": "h200"}, r"cluster 'h200': write <count>x<kind>.*did you mean 8xH200"),
        ({"mesh": "x=16"}, r"mesh x=16 has 16 devices, the cluster 8"),
        ({"mesh": "8"}, r"mesh '8': '8' is not of the form name=size"),
        ({"mesh": "x=0"}, r"'x' has size 0: a size is a whole number of 1 or more"),
        ({"mesh": "x=2,x=4"}, r"'x' is given twice"),
        ({"memory": -5}, r"a size of -5 bytes is negative"),
        ({"memory": "-5GiB"}, r"'-5GiB' is not a size"),
        ({"memory": "lots"}, r"'lots' is not a size; write a number and one of"),
        ({"memory": 1.5}, r"not 1\.5"),
        ({"cluster": Cluster(), "mesh": Mesh({"x": 2})}, r"needs device data: use Cluster\.preset"),
    ],
)
def test_a_cluster_a_mesh_or_a_budget_that_is_none(others: dict[str, Any], says: str) -> None:
    with pytest.raises(ScrimpError, match=says):
        source(**others)


@pytest.mark.parametrize(("model", "says"), [(3, "not int"), (Net, "not the class Net: give an instance")])
def test_what_is_no_model(model: Any, says: str) -> None:
    with pytest.raises(PlanError, match=f"model must be a torch.nn.Module, {says}"):
        plan(model, (X,), "8xH100")


@pytest.mark.parametrize("objective", ["memory", "time", "redundancy"])
@pytest.mark.parametrize("mesh", ["x=8", "x=2,y=4", None])
def test_a_budget_that_is_too_small_names_the_least_that_is_not(objective: str, mesh: str | None) -> None:
    with pytest.raises(FitError) as caught:
        source(mesh=mesh, memory="1KiB", objective=objective)
    found = re.search(r"Use a limit of (\d+) bytes or more", str(caught.value))
    assert found is not None
    least = int(found[1])
    assert source(mesh=mesh, memory=least, objective=objective).memory.peak_nbytes <= least
    with pytest.raises(FitError):
        source(mesh=mesh, memory=least // 2, objective=objective)


def test_a_batch_that_no_axis_divides_is_told() -> None:
    with pytest.warns(PlanWarning, match=r"no axis of the mesh x=8 divides the batch's 9 rows.*a multiple of 8, such as 8$"):
        found = source(inputs=(torch.zeros(9, 16),))
    assert found.memory.peak_nbytes > 0
    with pytest.warns(PlanWarning, match=r"mesh x=2,y=4 divides the batch's 3 rows.*a multiple of 2, such as 4$"):
        source(inputs=(torch.zeros(3, 16),), mesh="x=2,y=4")
    source(inputs=(torch.zeros(6, 16),), mesh="x=2,y=4")  # one of them does: nothing is said, or the test would fail


# The same from the command line: exit code 2, one message, no traceback.

MODULE = """
import torch
from torch import nn


class Net(nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        {body}


def made():
    return Net(16, 16), (torch.zeros(8, 16),)


def wrong():
    return Net(16, 16)


def fails():
    raise KeyError("no such thing")
"""


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (
            "return (y @ torch.ones(3, 4)).mean()",
            r"the model, \S*broken_net\w*\.py:\d+: the forward fails on this batch .*\[3, 4\]",
        ),
        (
            "return y.mean() if y.sum() > 0 else y.sum()",
            r"broken_net\w*\.py:\d+: the forward depends on the values.*Engine without",
        ),
        ("return y", r"Net must return a scalar loss"),
    ],
)
def test_models_that_cannot_be_captured_on_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, says: str
) -> None:
    name = f"broken_net_{abs(hash(body))}"
    (tmp_path / f"{name}.py").write_text(MODULE.format(body=body))
    monkeypatch.chdir(tmp_path)
    told = scrimp("plan", f"{name}:made", "--cluster", "8xH100", "--mesh", "x=8", code=1)
    assert re.search(says, told.stderr)
    assert told.stderr.startswith("error: ")
    assert "Traceback" not in told.stderr
    for function, words in (("wrong", "must return a model and its batch, not Net"), ("fails", "fails() failed: KeyError")):
        assert words in scrimp("plan", f"{name}:{function}", "--cluster", "8xH100", code=2).stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["gpt-tinny"], r"the zoo has no model 'gpt-tinny'; .*did you mean gpt-tiny"),
        (["gpt-tiny", "--cluster", "8xH1000"], r"did you mean 8xH100"),
        (["gpt-tiny", "--mesh", "x=16"], r"mesh x=16 has 16 devices, the cluster 8"),
        (["gpt-tiny", "--mesh", "eight"], r"'eight' is not of the form name=size"),
        (["gpt-tiny", "--mesh", ""], r"--mesh '': write axes and their sizes"),
        (["gpt-tiny", "--memory", "-1GiB"], r"'-1GiB' is not a size"),
        (["gpt-tiny", "--memory", "0"], r"--memory 0: give a size"),
        (
            ["gpt-tiny", "--mesh", "x=8", "--memory", "1KiB"],
            r"Use a limit of \d+ bytes or more, more devices, or a smaller batch",
        ),
        (["gpt-tiny", "--precision", "bf61"], r"precision='bf61': .*did you mean 'bf16'"),
        (["gpt-tiny", "--optimizer", "adam"], r"optimizer='adam': .*did you mean 'adamw'"),
        (["gpt-tiny", "--objective", "speed"], r"objective='speed': there are memory, time, redundancy"),
        (
            ["gpt-tiny", "--set", "layers=many"],
            r"gpt-tiny with layers=many: layers is a whole number from 1 to 10,000; gpt-tiny has 2",
        ),
        (["gpt-tiny", "--set", "layer=3"], r"gpt-tiny has no setting layer; it has .*layers"),
        (["gpt-tiny", "--set", "heads=5"], r"gpt-tiny with .*heads"),
    ],
)
def test_what_is_refused_on_the_command_line(arguments: list[str], says: str) -> None:
    cluster = [] if "--cluster" in arguments else ["--cluster", "8xH100"]
    told = scrimp("plan", *arguments, *cluster, code=1 if "1KiB" in arguments else 2)
    assert re.search(says, told.stderr)
    assert told.stderr.startswith("error: ")
    assert len(told.stderr.strip().splitlines()) == 1


def test_a_batch_that_no_axis_divides_on_the_command_line() -> None:
    told = scrimp("plan", "gpt-tiny", "--cluster", "8xH100", "--mesh", "x=8", "--batch", "9", "--keep")
    assert "no axis of the mesh x=8 divides the batch's 9 rows" in told.stderr


def test_the_zoo_names_what_is_near() -> None:
    with pytest.raises(ScrimpError, match=r"did you mean llama-70b"):
        zoo.config("llama-70")
