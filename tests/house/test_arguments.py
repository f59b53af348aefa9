"""Words that the engine and the planner share: one form, and old names that say the new ones."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import pytest
import torch

import scrimp
from scrimp import Engine, Memory, Mesh, PlanError, RunError, zoo
from scrimp._arguments import activations_of
from scrimp._warnings import warn

EVERYDAY = {
    "step", "evaluate", "backward", "update", "zero_grad", "lr", "optimizer", "full_parameters", "save", "load", "state_dict",
    "iter_state", "batch_part", "dtensors", "ledger", "bound", "report", "resize", "close",
}  # fmt: skip


def engine(**settings: Any) -> Engine:
    return Engine(zoo.build("gpt-tiny"), **{"memory": "1GiB", "device": "cpu", **settings})


def test_an_engine_shows_what_users_call_and_nothing_else() -> None:
    with engine() as made:
        assert {name for name in dir(made) if not name.startswith("_")} == EVERYDAY


def test_both_share_their_words() -> None:
    shared = {"optimizer", "memory", "activations", "micro_batches", "mesh", "precision"}
    for function in (Engine.__init__, scrimp.plan):
        assert shared <= inspect.signature(function).parameters.keys()


@pytest.mark.parametrize(
    ("given", "ways"),
    [
        ("auto", ("keep", "recompute", "offload")),
        ("keep", ("keep",)),
        ("offload, recompute", ("recompute", "offload")),
        ({"recompute", "keep"}, ("keep", "recompute")),
        (["keep"], ("keep",)),
    ],
)
def test_activations_by_name_or_set(given: Any, ways: tuple[str, ...]) -> None:
    assert activations_of(given, RunError) == ways


@pytest.mark.parametrize("given", ["", "none", "keep,drop", {"all"}, [], None, 3])
def test_activations_that_are_refused(given: Any) -> None:
    with pytest.raises(PlanError, match=r"activations=.*: give 'auto', or some of keep, recompute, offload"):
        activations_of(given, PlanError)


@pytest.mark.parametrize(("old", "value", "new"), [("accumulate", 2, "micro_batches"), ("recompute", "all", "activations")])
def test_an_old_name_raises_and_names_the_new_one(old: str, value: Any, new: str) -> None:
    with pytest.raises(RunError, match=f"no argument '{old}' any more: write {new}"):
        engine(**{old: value})


def test_short_forms_of_the_engine() -> None:
    with engine(memory="900MiB", optimizer="sgd", mesh=None) as made:
        assert made._run.budget.device_nbytes == 900 << 20
        assert isinstance(made.optimizer.settings, scrimp.SGD)
    for wrong, words in (({"memory": 1.5}, "memory=1.5"), ({"optimizer": "adam"}, "optimizer='adam'")):
        with pytest.raises(RunError, match=words):
            engine(**wrong)


@pytest.mark.parametrize("activations", ["offload", "keep,offload"])
def test_what_is_offloaded_is_recomputed(activations: str) -> None:
    with pytest.raises(RunError, match="offloads the inputs of layers that it recomputes; add 'recompute'"):
        engine(activations=activations)


def test_a_plan_takes_the_engines_objects() -> None:
    with torch.device("meta"):
        model = zoo.build("gpt-tiny", layers=1)
    batch = zoo.example_batch("gpt-tiny", 8, layers=1)
    settings: dict[str, Any] = {"mesh": Mesh({"x": 2}), "time_limit": 5, "activations": {"keep"}}
    one = scrimp.plan(model, batch, "2xA100-80", optimizer="sgd", memory="1GiB", **settings)
    other = scrimp.plan(model, batch, "2xA100-80", optimizer=scrimp.SGD(momentum=0.9), memory=Memory(device="1GiB"), **settings)
    assert (one.optimizer, one.memory) == (other.optimizer, other.memory)
    for optimizer, words in ((scrimp.AdamW(state="int8"), "fp32 states only"), (scrimp.SGD(), "SGD without momentum")):
        with pytest.raises(PlanError, match=words):
            scrimp.plan(model, batch, "2xA100-80", optimizer=optimizer, **settings)


def test_a_warning_of_a_plan_points_at_the_users_line() -> None:
    with torch.device("meta"):
        model = zoo.build("gpt-tiny", layers=1)
    with pytest.warns(scrimp.PlanWarning, match="no axis of the mesh") as caught:
        scrimp.plan(model, zoo.example_batch("gpt-tiny", 7, layers=1), "2xA100-80", mesh="x=2", time_limit=5, activations="keep")
    assert [each.filename for each in caught] == [__file__]


def test_a_warning_points_at_the_users_line() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn("words")
        with engine() as made:
            made._run.model.eval()
            made.step(*zoo.example_batch("gpt-tiny", batch=2, step=0))
    assert [each.filename for each in caught] == [__file__] * 2
