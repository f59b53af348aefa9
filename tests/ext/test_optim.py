"""torch's optimizers as scrimp's: the same groups and settings, in the same order, and rates that follow a scheduler."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from scrimp import AdamW, Engine
from scrimp.errors import RunError
from scrimp.ext.optim import copy_settings, optimizer_of


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))


def groups(model: nn.Module) -> list[dict[str, Any]]:
    named = dict(model.named_parameters())
    return [
        {"params": [named["0.weight"], named["1.weight"]], "weight_decay": 0.1, "lr": 0.02},
        {"params": [named["0.bias"], named["1.bias"]]},
        {"params": []},
    ]


KINDS: dict[str, Any] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.0, fused=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9, nesterov=True, fused=True),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_updates(kind: str) -> None:
    """With groups, and a scheduler of the torch optimizer, whose step changes nothing: the weights of plain PyTorch."""
    plain, model = net(), net()
    optimizer, shell = KINDS[kind](groups(plain)), KINDS[kind](groups(model))
    schedulers = [torch.optim.lr_scheduler.LambdaLR(one, lambda step: 1 / (1 + step)) for one in (optimizer, shell)]
    given = optimizer_of(shell, model.named_parameters())
    engine = Engine(model, optimizer=given, memory="1GiB", device="cpu", precision="fp32", loss=lambda out: out.square().mean())
    for k in range(5):
        batch = torch.randn(3, 4, generator=torch.Generator().manual_seed(k))
        plain(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        copy_settings(shell, engine)
        engine.step(batch)
        shell.step()
        for scheduler in schedulers:
            scheduler.step()
    state = engine.state_dict()
    assert all(torch.equal(state[name], value) for name, value in plain.state_dict().items())


def test_rates_and_frozen_parameters() -> None:
    model = net()
    model[0].bias.requires_grad_(False)
    found = optimizer_of(KINDS["adamw"](groups(model)), model.named_parameters(), [1.0, 2.0, 3.0])
    rows: Any = found.groups
    assert isinstance(found, AdamW)
    assert [settings["lr"] for _, settings in rows] == [1.0, 2.0, 3.0]
    assert [names for names, _ in rows] == [("0.weight", "1.weight"), ("1.bias",), ()]


def test_names_with_the_signs_of_patterns() -> None:
    model = nn.ModuleDict({"a[0]": nn.Linear(2, 2), "a0": nn.Linear(2, 2), "b*": nn.Linear(2, 2)})
    plain = torch.optim.AdamW([{"params": [*one.parameters()]} for one in model.values()], fused=True)
    engine = Engine(model, optimizer=optimizer_of(plain, model.named_parameters()), memory="1GiB", device="cpu")
    assert [len(group["params"]) for group in engine.optimizer.param_groups] == [2, 2, 2]


class Own(torch.optim.AdamW):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda p: torch.optim.Adagrad(p), r"torch\.optim\.adagrad\.Adagrad is an optimizer that scrimp does not have; it has"),
        (lambda p: Own(p), r"Own is an optimizer that scrimp does not have"),
        (lambda p: torch.optim.AdamW(p, amsgrad=True), r"group 0 of AdamW has amsgrad=True"),
        (lambda p: torch.optim.SGD(p, lr=1, maximize=True), r"group 0 of SGD has maximize=True"),
        (lambda p: torch.optim.AdamW([torch.ones(3, requires_grad=True)]), r"shape \(3,\) that is no parameter of the model"),
    ],
)
def test_what_scrimp_lacks(make: Any, words: str) -> None:
    model = net()
    with pytest.raises(RunError, match=words):
        optimizer_of(make(model.parameters()), model.named_parameters())


def test_rates_for_other_groups() -> None:
    model = net()
    with pytest.raises(RunError, match="2 learning rates were given for the 3 groups of AdamW"):
        optimizer_of(KINDS["adamw"](groups(copy.deepcopy(model))), model.named_parameters(), [1.0, 2.0])


def test_without_fused() -> None:
    model = net()
    with pytest.warns(UserWarning, match=r"AdamW without fused=True rounds in other places"):
        optimizer_of(torch.optim.AdamW(model.parameters()), model.named_parameters())
