"""Models that are odd: no lists, borders that share bytes, writes in place, frozen parts; and those that are refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from scrimp.capture import Graph, capture
from scrimp.errors import CaptureError
from tests.capture.test_capture import assert_runs_like, counts


class Chain(nn.Module):
    """Blocks without modules of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 8)
        self.weights = nn.ParameterList(torch.randn(8, 8) / 3 for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for weight in self.weights:
            x = x + torch.tanh(x @ weight)
        return x.square().mean()


class Block(nn.Module):
    """Writes into what it is given, counts its calls, and gives out three tensors that share bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.ones(8))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor, y: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        self.calls += 1
        h = self.linear(y) * mask
        x.add_(h)
        return x, h.view(-1, 8), (h * self.scale)[:1].expand(3, 8)


class Sharing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        y, z, mask = x * 2, x * 3, torch.ones(8)
        for block in self.blocks:
            x, y, z = block(x, y + z, mask)
        return (x * y * z).sum()


class Pair(nn.Module):
    """Gives out a tensor and a view: of that tensor, or of what came in."""

    def __init__(self, of_input: bool) -> None:
        super().__init__()
        self.of_input = of_input
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        made = left * 2 + self.down(torch.tanh(self.up(right.t())))
        return made, (left if self.of_input else made).t()


class Pairs(nn.Module):
    def __init__(self, of_input: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Pair(of_input) for _ in range(4))
        self.first = nn.Linear(4, 4)
        self.last = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.first(x), x.t()
        for block in self.blocks:
            left, right = block(left, right)
        return (self.last(left) * right.mean()).sum()


class Twice(nn.Module):
    """A block that also runs without recording gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros(())
        for block in self.blocks:
            with torch.no_grad():
                total = total + block(x).mean()
            x = block(x)
        return x.sum() * total


class Experts(nn.Module):
    """Residual blocks of alike members: the block is the layer, not its members."""

    def __init__(self) -> None:
        super().__init__()
        experts = [nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(3)) for _ in range(4)]
        self.blocks = nn.ModuleList(Mixed(each) for each in experts)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class Mixed(nn.Module):
    def __init__(self, experts: nn.ModuleList) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for expert in self.experts:
            y = expert(y)
        return x + torch.tanh(y)


class SharedActivation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        act = nn.GELU()
        self.first = nn.Linear(5, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), act, nn.Linear(8, 8)) for _ in range(4))
        self.last = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.last(x).square().mean()


def case(model: Callable[[], nn.Module], width: int) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    return model(), {"x": torch.randn(3, width)}


@pytest.mark.parametrize(
    ("model", "width", "layers", "graphs"),
    [(Chain, 5, 7, 3), (SharedActivation, 5, 6, 3), (Sharing, 8, 4, 3), (Twice, 8, 5, 4), (Experts, 8, 4, 3)],
)
def test_odd_models_run_as_they_do(model: Callable[[], nn.Module], width: int, layers: int, graphs: int) -> None:
    made, batch = case(model, width)
    graph = capture(made, tuple(batch.values()))
    assert counts(graph)[:2] == (layers, graphs), [(layer.path, layer.graph) for layer in graph.layers]
    assert_runs_like(made, batch, graph)


def test_a_residual_sum_outside_of_the_block_belongs_to_it() -> None:
    made, batch = case(SharedActivation, 5)
    graph = capture(made, tuple(batch.values()))
    assert [layer.path for layer in graph.layers] == ["first", *(f"blocks.{k}" for k in range(4)), ""]
    assert [len(layer.inputs) for layer in graph.layers] == [1] * 6


@pytest.mark.parametrize("of_input", [False, True])
def test_borders_share_no_bytes(of_input: bool) -> None:
    """Autograd would give no gradient to the view."""
    made, batch = case(lambda: Pairs(of_input), 4)
    graph = capture(made, tuple(batch.values()))
    assert [layer.path for layer in graph.layers[1:-1]] == [f"blocks.{k}" for k in range(4)]
    block = graph.graphs[graph.layers[2].graph]
    assert len(block.outputs) == len(block.tangents) == 2
    for each in graph.graphs:
        storage = {value.name: value.storage for value in each.values}
        borders = [storage[name] for name in (*each.inputs, *each.outputs)]
        assert len({*borders}) == len(borders)
    assert_runs_like(made, batch, graph)


def test_what_is_frozen_gets_no_gradient() -> None:
    made, batch = case(Experts, 8)
    for name, parameter in made.named_parameters():
        parameter.requires_grad_(name.startswith(("blocks.2", "blocks.3")) and name.endswith("bias"))
    graph = capture(made, tuple(batch.values()))
    assert {parameter.name for parameter in graph.parameters if parameter.trained} == {
        name for name, parameter in made.named_parameters() if parameter.requires_grad
    }
    assert not any(op.backward for op in graph.graphs[graph.layers[0].graph].ops)
    assert_runs_like(made, batch, graph)


def test_dropout_keeps_its_mask() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), Sum())
    ops = capture(model, (torch.randn(2, 4),)).graphs[0].ops
    drop, back = (next(op for op in ops if op.target.startswith(f"aten.native_dropout{end}.")) for end in ("", "_backward"))
    assert drop.outputs[1] in back.inputs
    assert drop.cell == back.cell
    assert not any("dropout" in op.target for op in capture(model.eval(), (torch.randn(2, 4),)).graphs[0].ops)


class Sum(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sum()


class Odd(nn.Module):
    def __init__(self, function: Callable[[Odd, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.ones(4))
        self.plain = torch.ones(4)
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def odd(function: Callable[[Any, Tensor], Tensor]) -> Graph:
    return capture(nn.Sequential(nn.Linear(4, 4), Odd(function), Sum()), (torch.randn(3, 4),))


def branches(odd: Odd, x: Tensor) -> Tensor:
    return x * odd.weight if x.sum() > 0 else x


def takes_a_number(odd: Odd, x: Tensor) -> Tensor:
    return x * odd.weight * x.sum().item()


def chooses_rows(odd: Odd, x: Tensor) -> Tensor:
    return x[x > 0] * odd.weight.sum()


def casts(odd: Odd, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return F.linear(x, torch.outer(odd.weight, odd.weight))


def recomputes(odd: Odd, x: Tensor) -> Tensor:
    return checkpoint(lambda y: torch.tanh(y * odd.weight), x, use_reentrant=False)  # type: ignore[no-any-return]


def makes_a_table(odd: Odd, x: Tensor) -> Tensor:
    return x * torch.tensor([1.0, 2.0, 3.0, 4.0]) * odd.weight


def holds_a_tensor(odd: Odd, x: Tensor) -> Tensor:
    return x * odd.plain * odd.weight


def writes_a_parameter(odd: Odd, x: Tensor) -> Tensor:
    with torch.no_grad():
        odd.weight.mul_(0.5)
    return x * odd.weight


def prints(odd: Odd, x: Tensor) -> Tensor:
    print("here")
    return x * odd.weight


WAY_OUT = r".*run Engine without a plan"


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (branches, r"1, split/test_split\.py:\d+: the forward depends on the values of tensors.*" + WAY_OUT),
        (takes_a_number, r"1, split/test_split\.py:\d+: item returns a number or a shape that depends" + WAY_OUT),
        (chooses_rows, r"1, split/test_split\.py:\d+: getitem returns a number or a shape that depends" + WAY_OUT),
        (casts, r"1, split/test_split\.py:\d+: autocast inside forward .* cast the parameters instead" + WAY_OUT),
        (recomputes, r"1, split/test_split\.py:\d+: activation checkpointing is on inside the model"),
        (makes_a_table, r"1, split/test_split\.py:\d+: a tensor of shape \(4,\) is made of Python numbers .* buffer"),
        (holds_a_tensor, r"Sequential uses a tensor of shape \(4,\) that is neither a parameter, nor a buffer, .* as a buffer"),
        (writes_a_parameter, r"1, split/test_split\.py:\d+: the parameter 1\.weight is written into in place" + WAY_OUT),
        (prints, r"1, split/test_split\.py:\d+: .* has calls that cannot be traced \(Failed to trace builtin operator" + WAY_OUT),
    ],
)
def test_what_cannot_be_captured_is_refused_by_name(function: Callable[[Any, Tensor], Tensor], message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        odd(function)


def test_a_number_made_a_tensor_is_an_operator() -> None:
    model = Odd(lambda odd, x: (x * torch.tensor(2.0) * odd.weight).sum())
    batch = {"x": torch.randn(3, 4)}
    graph = capture(model, (), batch)
    (op,) = [op for op in graph.graphs[0].ops if op.target == "aten.full.default"]
    assert op.args == ((), 2.0)
    assert_runs_like(model, batch, graph)


def test_attributes_that_forward_sets_are_told() -> None:
    def counts_calls(odd: Odd, x: Tensor) -> Tensor:
        odd.count += 1
        return x * odd.weight

    with pytest.warns(UserWarning, match="Sequential: the forward sets attributes of 1, which a planned step does not"):
        odd(counts_calls)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        capture(Sharing(), (torch.randn(3, 8),))  # it writes into its buffers, which the graph does too


def test_a_loss_that_is_cast_to_what_it_is() -> None:
    model, batch = Odd(lambda odd, x: (x * odd.weight).sum().float()), {"x": torch.randn(3, 4)}
    assert_runs_like(model, batch, capture(model, (), batch))


@pytest.mark.parametrize(("result", "got"), [(lambda x: x, r"a tensor of shape \(3, 4\)"), (lambda x: {"logits": x}, "no loss")])
def test_a_loss_is_a_scalar(result: Callable[[Tensor], Any], got: str) -> None:
    class Model(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return result(super().forward(x))

    with pytest.raises(CaptureError, match=f"Model must return a scalar loss .* but gave {got}"):
        capture(Model(4, 4), (torch.randn(3, 4),))


def test_a_value_written_into_and_read_by_a_later_layer_is_refused() -> None:
    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(8, 8)
            self.blocks = nn.ModuleList(Block() for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            x, mask = self.first(x), torch.ones(8)
            kept, y = x * 2, x * 3
            row = kept[0]
            for block in self.blocks:
                _, y, _ = block(kept, y, mask)
            return (y + row).sum()

    with pytest.raises(CaptureError, match=r"blocks\.0, .*'kept', which other layers read later, is written into in place"):
        capture(Keeps(), (torch.randn(3, 8),))
