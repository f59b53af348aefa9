"""Says when a private name of torch that capture leans on has changed."""

from __future__ import annotations

import operator
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, fx, nn

from scrimp.capture.torch_private import dynamo as door
from scrimp.capture.torch_private.joint import (
    DATA_DEPENDENT,
    FakeTensorMode,
    describe,
    is_backward,
    is_view,
    sequence_number,
    trace_joint,
)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, args: tuple[Tensor, Tensor], kwargs: dict[str, Tensor]) -> Tensor:
        torch._C._log_api_usage_once("scrimp.test")
        with torch.no_grad():
            self.steps.add_(1)
        with torch.autocast("cpu", enabled=False):
            y = self.inner(args[0])
        return (y * kwargs["z"] + args[1]).sum()


def test_dynamo_gives_a_graph_and_the_tensors_it_stands_on() -> None:
    model = Model()
    x, y, z = (torch.randn(2, 4) for _ in range(3))
    module, tensors, effects = door.trace(model, ((x, y), {"z": z}))
    assert effects == []
    holders = [node for node in module.graph.nodes if node.op == "placeholder"]
    known = {id(tensor) for tensor in (x, y, z, model.inner.weight, model.inner.bias, model.steps)}
    assert {id(tensor) for tensor in tensors} == known
    assert [tuple(node.meta["example_value"].shape) for node in holders] == [tuple(tensor.shape) for tensor in tensors]
    (linear,) = [node for node in module.graph.nodes if node.target is F.linear or node.target is torch._C._nn.linear]
    assert door.modules_of(linear)[-1] == id(model.inner)
    assert door.line_of(linear.meta["stack_trace"]).startswith("torch_private/test_private.py:")
    assert [door.grad_switch(node) for node in module.graph.nodes if door.grad_switch(node) is not None] == [False, True]
    assert [door.autocast_enters(node) for node in module.graph.nodes if door.autocast_enters(node) is not None] == [False]
    assert sum(door.autocast_exits(node) for node in module.graph.nodes) == 1
    assert linear.meta["example_value"].requires_grad


def test_dynamo_says_where_it_stops() -> None:
    class Branches(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.sum() > 0 else -x

    with pytest.raises(door.Refused) as caught:
        door.trace(Branches(), (torch.ones(2),))
    assert str(caught.value.frames[-1]).startswith("torch_private/test_private.py:")
    assert caught.value.reason.startswith("Data-dependent branching: ")


def joint_of() -> fx.GraphModule:
    graph = fx.Graph()
    x, weight, count = (graph.placeholder(name) for name in ("x", "weight", "count"))
    graph.call_method("add_", (count, 1))
    y = graph.call_function(torch.mm, (x, weight))
    z = graph.call_function(torch.tanh, (y,))
    total = graph.call_function(operator.add, (z, y))
    graph.output((total, graph.call_method("detach", (y,))))
    mode = FakeTensorMode()
    with mode:
        inputs = [torch.empty(2, 4, requires_grad=True), torch.empty(4, 4, requires_grad=True), torch.empty(())]
    return trace_joint(fx.GraphModule(nn.Module(), graph), inputs)


def test_the_joint_graph_says_what_its_inputs_and_outputs_are() -> None:
    ends = describe(joint_of())
    assert sorted(ends.inputs) == [0, 1, 2]
    assert sorted(ends.outputs) == [0, 1]
    assert sorted(ends.tangents) == [0]  # what is detached has none
    assert sorted(ends.gradients) == [0, 1]
    assert sorted(ends.updates) == [2]


def test_numbers_tie_the_backward_to_the_forward_and_are_left_over_where_gradients_are_summed() -> None:
    nodes = [node for node in joint_of().graph.nodes if node.op == "call_function"]
    aten = torch.ops.aten
    number = {(node.target, is_backward(node)): sequence_number(node) for node in nodes}
    assert number[aten.tanh.default, False] == number[aten.tanh_backward.default, True]
    assert number[aten.mm.default, False] == number[aten.mm.default, True]
    last = max(value for (_, backward), value in number.items() if not backward and value is not None)
    assert number[aten.add.Tensor, True] == last  # not of the operator whose gradient it sums


def test_fakes_know_their_storage() -> None:
    with FakeTensorMode():
        x = torch.empty(2, 3)
        assert door.storage_of(x) == door.storage_of(x.t()) != door.storage_of(x.clone())


def test_schemas_say_what_is_a_view() -> None:
    aten = torch.ops.aten
    views = [
        aten.view.default,
        aten._unsafe_view.default,
        aten.t.default,
        aten.split.Tensor,
        aten.unbind.int,
        aten.expand.default,
    ]
    assert all(is_view(target) for target in views)
    assert not any(is_view(target) for target in (aten.mm.default, aten.clone.default, aten.add_.Tensor, operator.getitem))


@pytest.mark.parametrize("asks", [lambda x: x.sum().item(), lambda x: bool(x.sum() > 0), lambda x: x.nonzero()])
def test_fakes_say_that_they_have_no_numbers(asks: Callable[[Tensor], object]) -> None:
    with FakeTensorMode(), pytest.raises(DATA_DEPENDENT):
        asks(torch.ones(4))


def test_lines_of_torch_itself_are_passed_over_but_for_its_modules() -> None:
    where = Path(torch.__file__).parent
    user = 'File "/opt/torch/model/net.py", line 7, in forward'
    wrapper = f'File "{where / "utils" / "_device.py"}", line 116, in __torch_function__'
    module = f'File "{where / "nn" / "modules" / "linear.py"}", line 125, in forward'
    assert door.line_of(f"  {user}\n    y = f(x)\n  {wrapper}\n    return g()") == "model/net.py:7"
    assert door.line_of(f"  {user}\n  {module}\n  {wrapper}") == "modules/linear.py:125"
    assert door.line_of(wrapper) == "utils/_device.py:116"
    assert door.line_of(None) == "?"


def test_dynamo_learns_torchs_functions_before_any_is_replaced() -> None:
    """In a fresh process, whose first trace would see the replacements. The table is made once."""
    code = (
        "import torch\n"
        "from scrimp.capture.trace.decided import decided\n"
        "from torch._dynamo import trace_rules\n"
        "real = torch.rand\n"
        "with decided():\n"
        "    table = trace_rules.get_torch_obj_rule_map()\n"
        "    assert torch.rand is not real\n"
        "    assert real in table and torch.rand not in table\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
