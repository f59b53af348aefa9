"""The reference of errors: each of its messages is raised here, by what a user would do."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import scrimp
from scrimp import zoo
from scrimp.train import RESUME, read_config, train
from tests.train.runs import TOML, run, written

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "errors.md"


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 32), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(nn.functional.glu(self.first(x))).mean()


def adopted_twice(_: Path) -> None:
    model = zoo.build("gpt-tiny", layers=1)
    with scrimp.Engine(model, memory="1GiB", device="cpu"):
        scrimp.Engine(model, memory="1GiB", device="cpu")


def renamed(_: Path) -> None:
    scrimp.Engine(zoo.build("gpt-tiny"), accumulate=2)  # type: ignore[call-arg]


def rate_of_a_function(_: Path) -> None:
    model, optimizer = zoo.build("gpt-tiny", layers=1), scrimp.AdamW(lr=lambda step: 1e-3)
    with scrimp.Engine(model, optimizer=optimizer, memory="1GiB", device="cpu") as engine:
        engine.lr = 1e-4


def without_a_rule(_: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", scrimp.PlanWarning)
        scrimp.plan(Gated(), (torch.zeros(8, 16),), "2xCPU", mesh="x=2", time_limit=2)


def unknown_key(folder: Path) -> None:
    read_config(written(folder), ["train.stepz=3"])


def unused_key(folder: Path) -> None:
    read_config(written(folder, TOML.replace('kind = "cosine"', 'kind = "constant"\nfinal = 0.5')))


def too_little_host(folder: Path) -> None:
    (folder / "small.toml").write_text("nodes = 2\ndevices_per_node = 1\nkind = '24GiB'\n[host]\nmemory = '9KiB'\n")
    settings = [f"cluster.name={folder / 'small.toml'}", f"run.folder={folder / 'run'}", "memory.device=2KiB"]
    config = read_config(written(folder), settings)
    train(config, dry_run=True, quiet=True)


def trained_twice(folder: Path) -> None:
    for _ in range(2):
        run(written(folder), "train.steps=2", folder=folder / "run")


def other_samples(folder: Path) -> None:
    run(written(folder), "train.steps=2", folder=folder / "run")
    run(written(folder), "train.seed=9", how=RESUME, folder=folder / "run")


def no_such_weights(folder: Path) -> None:
    scrimp.Engine(zoo.build("gpt-tiny"), weights=folder / "none", memory="1GiB", device="cpu")


RAISERS: dict[str, Callable[[Path], None]] = {
    "another engine has adopted this model": adopted_twice,
    "has no argument 'accumulate' any more": renamed,
    "lr is a function of the step": rate_of_a_function,
    "has no rule, so every device runs all of it": without_a_rule,
    "has no key 'stepz'; did you mean 'steps'?": unknown_key,
    "has no effect with": unused_key,
    "before the run: host memory needs": too_little_host,
    "has a run: go on with it by scrimp train --resume": trained_twice,
    "the resumed run would see other samples": other_samples,
    "there is no such file or folder (models are not downloaded)": no_such_weights,
}


def test_the_page_has_these_messages() -> None:
    table = PAGE.read_text().partition("## Common messages")[2].partition("## ")[0]
    assert re.findall(r"^\| `([^`]+)` \|", table, re.M) == [*RAISERS]


@pytest.mark.parametrize("message", RAISERS)
def test_each_message_is_raised(message: str, tmp_path: Path) -> None:
    with pytest.raises((scrimp.ScrimpError, scrimp.PlanWarning), match=re.escape(message)):
        RAISERS[message](tmp_path)
