"""Ranks that make different calls stop, and say which."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from scrimp.chunks.tables.optimizers import SGD
from scrimp.chunks.transfer.collectives import Wire
from scrimp.engine import Engine, Memory
from scrimp.engine.entry.rank_calls import NAMES, Calls, Record, same_calls
from scrimp.errors import RunError
from scrimp.ext.ranks import RankPool, pool
from tests.rank_jobs import calls as jobs

SECONDS = 4.0


def test_the_same_calls_go_through() -> None:
    assert pool(2).run(jobs.alike) == [[8, NAMES.index("step")]] * 2


@pytest.mark.parametrize(
    ("names", "sparse"),
    [
        (("step", "save"), False),
        (("evaluate", "step"), False),
        (("save", "state_dict"), False),
        (("step", "state_dict"), True),
        pytest.param(("load", "step"), False, marks=pytest.mark.full),
        pytest.param(("iter_state", "evaluate"), False, marks=pytest.mark.full),
    ],
)
def test_calls_that_differ_are_both_named(names: tuple[str, str], sparse: bool) -> None:
    """On both ranks, within the time-out of a collective; at once on a rank that does not step."""
    with RankPool(2, collective_timeout_seconds=SECONDS, timeout_seconds=60) as ranks:
        answers = ranks.run(jobs.differ, names, sparse)
    want = (
        f"the ranks' calls differ: as call 3 rank 0 calls engine.{names[0]} and rank 1 calls engine.{names[1]}; every rank must"
    )
    for name, (text, seconds) in zip(names, answers, strict=True):
        assert want in text, f"{name}: {text!r} after {seconds:.1f} s"
        assert seconds < (SECONDS + 3 if name == "step" else SECONDS)


def test_a_call_that_another_rank_does_not_make() -> None:
    with RankPool(2, collective_timeout_seconds=1, timeout_seconds=60) as ranks:
        (text, _), (none, _) = ranks.run(jobs.differ, ("save", "nothing"), False)
    assert not none
    assert "rank 0 calls engine.save as call 3, which rank 1 has not made: its last was call 2, engine.step" in text


def test_rows_that_travel_with_another_message() -> None:
    same_calls(torch.tensor([[3, 0], [3, 0]]))
    with pytest.raises(
        RunError, match=r"rank 0 calls engine\.step \(its call 3\) and rank 2 calls engine\.backward \(its call 3\)"
    ):
        same_calls(torch.tensor([[3, 0], [3, 0], [3, NAMES.index("backward")]]))


def test_a_record_goes_and_comes() -> None:
    record = Record(calls={3: "step", 4: "save"}, agreed=2, stopped=(1, "because"))
    assert Record.from_json(record.to_json()) == record
    assert record.last == 4
    assert Record().last == 0


def test_one_rank_asks_nobody() -> None:
    calls = Calls(Wire())
    calls.begin("save")
    assert calls.row == [1, NAMES.index("save")]


def test_a_call_inside_another() -> None:
    model = nn.Linear(4, 1)
    engine = Engine(model, optimizer=SGD(), memory=Memory(device="1GiB"), device="cpu", loss=torch.mean)
    with pytest.raises(RunError, match=r"engine\.state_dict was called inside engine\.evaluate"):
        engine.evaluate(lambda: engine.state_dict())
    assert engine.state_dict()
