"""Pipeline plans on gloo ranks: the numbers of one process and of torch's pipelining, the bytes of the plan, and the order."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from scrimp import Mesh, Plan, RunError
from scrimp.capture import BORDER, Value, to_json
from scrimp.ext.ranks import pool
from scrimp.lower import Shards, cut, lower, lower_stages
from scrimp.lower.pipeline import micro_rows
from scrimp.lower.stages import EXPECT, RUN, SEND, SENT, TAKE, Turn, messages, spread, tile_shape, turns
from scrimp.lower.weights.rest import rest_of
from scrimp.planner import Task, placed, tasks, unsplit
from tests.support.lowering.rehearse import Alone
from tests.support.lowering.run import Ran, worst_of
from tests.support.lowering.staged import accumulated, batch_for, build, graph_of, planned

ROWS, MICRO = 8, 4
Case = tuple[str, int, int, str, int, dict[str, Any]]  # family, stages, pieces a stage, mesh, hidden size, settings
QUICK: list[Case] = [
    ("gpt", 2, 2, "x=2", 256, {}),
    ("llama", 4, 1, "x=2", 32, {"activations": {"keep"}}),
]
KEEP = {"activations": {"keep"}}
FULL: list[Case] = [
    ("gpt", 2, 1, "x=1", 32, {}),  # its gradients are compared with torch's pipelining in every run
    *((family, stages, v, mesh, 32, {}) for family in ("gpt", "llama", "t5", "moe")
      for stages, v, mesh in ((2, 1, "x=2"), (2, 2, "x=2"), (4, 1, "x=2"), (4, 2, "x=2"), (2, 1, "x=2,y=2"), (2, 2, "x=2,y=2"))),
    *((family, stages, v, "x=1", 32, {}) for family in ("gpt", "llama", "t5", "moe") for stages, v in ((2, 2), (4, 1), (4, 2))),
    *((family, 2, v, "x=2", 256, {}) for family in ("gpt", "llama", "t5", "moe") for v in (1, 2)),
    *((family, stages, v, "x=2", 32, KEEP) for family in ("gpt", "t5", "moe") for stages, v in ((4, 1), (2, 2))),
]  # fmt: skip


def run(case: Case, *, generated: bool = False, channels: bool = False, micro: int = MICRO) -> tuple[Plan, Ran, list[Any]]:
    """The plan, one process, and what the ranks found."""
    family, stages, interleave, mesh, dim, settings = case
    model, batch = build(family, dim), batch_for(family, ROWS, dim)
    found = planned(model, batch, mesh, stages, micro, interleave, **settings)
    text = found.to_json()
    ran = pool(stages * found.mesh.size).run(
        "tests.rank_jobs.staged:step", text, to_json(graph_of(found, model, batch)), family, dim, ROWS, generated, channels
    )
    return found, accumulated(model, batch, micro), ran


def gathered(ran: Sequence[Any]) -> Ran:
    """The gradients of all stages; those on several ranks are equal."""
    every: dict[str, torch.Tensor] = {}
    for _, gradients, _, _ in ran:
        for name, each in gradients.items():
            assert torch.equal(every.setdefault(name, each), each), name
    return Ran(ran[0][0], every)


def check(case: Case, *, generated: bool = False, channels: bool = False) -> None:
    found, wanted, ran = run(case, generated=generated, channels=channels)
    for loss, *_ in ran:
        assert loss == pytest.approx(wanted.loss, rel=1e-6)
    assert worst_of(gathered(ran), wanted) < (1e-5, "")
    assert found.schedule is not None
    least, size = 0.98 if case[4] >= 256 else 0.95, found.mesh.size
    for s, stage in enumerate(found.schedule.stages):
        peak, where = max((nbytes, at) for _, _, nbytes, at in ran[s * size : (s + 1) * size])
        planned_nbytes = stage.memory.peak_nbytes
        assert least * planned_nbytes <= peak <= 1.01 * planned_nbytes, f"stage {s}: {where}, planned {stage.memory.where}"


@pytest.mark.parametrize("case", QUICK)
def test_stages_give_the_numbers_and_the_bytes_of_the_plan(case: Case) -> None:
    check(case)


@pytest.mark.full
@pytest.mark.parametrize("case", FULL)
def test_more_stages_give_the_numbers_and_the_bytes_of_the_plan(case: Case) -> None:
    if case[0] == "t5":
        pytest.importorskip("transformers")
    check(case)


@pytest.mark.full
def test_generated_source_runs_stages() -> None:
    check(("gpt", 2, 2, "x=2", 32, {}), generated=True)


@pytest.mark.parametrize("case", [
    ("gpt", 2, 2, "x=1", 32, KEEP),
    *(pytest.param((family, stages, v, mesh, 32, KEEP), marks=pytest.mark.full) for family, stages, v, mesh in (
        ("gpt", 2, 1, "x=1"), ("gpt", 2, 1, "x=2"), ("gpt", 2, 2, "x=2"), ("gpt", 4, 1, "x=1"), ("llama", 4, 2, "x=1"),
        ("t5", 4, 2, "x=1"), ("t5", 2, 2, "x=2"), ("moe", 4, 1, "x=2"),
    )),
])  # fmt: skip
def test_stages_without_tags_give_the_same(case: Case) -> None:
    """Over channels, as on NCCL, on gloo ranks: only the order of messages says which tensor they are of."""
    if case[0] == "t5":
        pytest.importorskip("transformers")
    check(case, channels=True)


def test_micro_batches_without_stages() -> None:
    check(("gpt", 1, 1, "x=2", 32, {}))


@pytest.mark.parametrize("interleave", [1, pytest.param(2, marks=pytest.mark.full)])
def test_gradients_are_those_of_torch_pipelining(interleave: int) -> None:
    found, _, ran = run(("gpt", 2, interleave, "x=1", 32, {}))
    assert found.schedule is not None
    cuts = [[*stage.pieces] for stage in found.schedule.stages]
    oracle = pool(2).run("tests.rank_jobs.staged:gradients", cuts, ROWS, MICRO)
    wanted: dict[str, torch.Tensor] = {}
    for _, gradients in oracle:
        for name, each in gradients.items():
            known = "embed.weight" if name == "head.weight" else name  # tied
            wanted[known] = wanted[known] + each if known in wanted else each
    assert ran[0][0] == pytest.approx(oracle[-1][0], rel=1e-6)
    assert worst_of(gathered(ran), Ran(ran[0][0], wanted)) < (1e-5, "")


# The order, without ranks.


def simulate(every: Sequence[Sequence[Turn]]) -> list[list[Task]]:
    """Runs the turns of all stages. A message arrives once it is sent and expected; TAKE and SENT wait for that. Raises if all
    wait, or if a buffer is used twice at once. Returns the tasks that each stage ran."""
    expected: dict[tuple[int, bool], Task] = {}
    sent: dict[tuple[int, bool], Task] = {}
    arrived: dict[tuple[int, bool], Task] = {}
    left, ran = [[*each] for each in every], [[] for _ in every]  # type: ignore[var-annotated]
    open_sends: set[tuple[int, bool]] = set()
    while any(left):
        moved = False
        for stage, mine in enumerate(left):
            while mine:
                turn, where = mine[0], (mine[0].task.piece, mine[0].task.backward)
                if turn.kind == EXPECT:
                    assert where not in expected, f"stage {stage}: {turn} while the buffer is in use"
                    assert where not in arrived, f"stage {stage}: {turn} while the buffer is full"
                    expected[where] = turn.task
                elif turn.kind == SEND:
                    assert where not in open_sends, f"stage {stage}: {turn} while the last one is on its way"
                    sent[where] = turn.task
                    open_sends.add(where)
                elif turn.kind == TAKE and where not in arrived:
                    break
                elif turn.kind == TAKE:
                    assert arrived.pop(where) == turn.task
                elif turn.kind == SENT and where in sent:
                    break
                elif turn.kind == SENT:
                    open_sends.remove(where)
                else:
                    ran[stage].append(turn.task)
                mine.pop(0)
                moved = True
                for each in sent.keys() & expected.keys():
                    assert sent[each] == expected[each]
                    arrived[each] = sent.pop(each)
                    del expected[each]
        assert moved, f"all stages wait: {[mine[0] for mine in left if mine]}"
    return ran


@pytest.mark.parametrize(("stages", "interleave"), [*product((1, 2, 3, 4, 8), (1, 2, 3))])
def test_no_stage_waits_for_ever(stages: int, interleave: int) -> None:
    if stages == 1 and interleave > 1:
        interleave = 1
    for rounds in (1, 2, 4):
        micro = stages * rounds
        ran = simulate([turns(stage, stages, micro, interleave) for stage in range(stages)])
        assert ran == [[*tasks(stage, stages, micro, interleave)] for stage in range(stages)]


def test_the_simulation_finds_a_deadlock() -> None:
    """A stage that waits for its send before it expects the gradient."""
    every = [[*turns(stage, 2, 4, 1)] for stage in range(2)]
    first = next(turn for turn in every[1] if turn.kind == EXPECT)
    every[1].remove(first)
    every[1].insert(next(k for k, turn in enumerate(every[1]) if turn.kind == RUN), first)
    with pytest.raises(AssertionError, match="all stages wait"):
        simulate(every)


# What crosses a border.


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (unsplit((8, 4)), unsplit((8, 4))),
        (unsplit((8, 4)), placed([[(8, ("x", "y"))], [(4, ())]])),
        (placed([[(8, ("x",))], [(4, ("y",))]]), placed([[(8, ("y",))], [(4, ("x",))]])),
        (placed([[(8, ("y", "x"))], [(4, ())]]), placed([[(2, ("x",)), (4, ())], [(4, ("y",))]])),
        (placed([[(8, ())], [(4, ("x",))]]), unsplit((8, 4))),
        (unsplit(()), unsplit(())),
    ],
)
def test_messages_give_every_rank_its_tile(before: Any, after: Any) -> None:
    mesh, whole = Mesh.parse("x=2,y=2"), torch.arange(32.0).view(8, 4) if before.shape else torch.tensor(3.0)
    for rank in range(mesh.size):
        made = torch.full(tile_shape(after, before, mesh), torch.nan)
        for each in messages(before, after, mesh):
            if each.receiver == rank:
                tile = cut(whole, before, mesh, each.sender).reshape(tile_shape(before, after, mesh))
                into = tuple(slice(*span) for span in each.target)
                assert made[into].isnan().all()
                made[into] = tile[tuple(slice(*span) for span in each.source)]
        assert torch.equal(made.view(cut(whole, after, mesh, rank).shape), cut(whole, after, mesh, rank))


def test_what_is_passed_on_is_split_over_all_ranks() -> None:
    mesh = Mesh.parse("x=2,y=4")
    assert str(spread((2, 12), mesh)) == "[x,y]"
    assert str(spread((8, 12), mesh)) == "[x*y,-]"
    assert str(spread((3, 5), mesh)) == "[-,-]"
    assert str(spread((), mesh)) == "[]"


def test_gradients_of_two_weights_share_no_bytes() -> None:
    """One tensor is the gradient of both: a sum of micro-batches in place must change neither it nor the other weight's sum."""
    mesh, use, whole = Mesh.parse("x=1"), unsplit((2, 3)), torch.zeros(2, 3)
    rest = {name: rest_of(name, (2, 3), "float32", use, (0,), mesh, trained=True) for name in "ab"}
    shards, gradient = Shards(rest, Alone(mesh), {"a": whole, "b": whole}), torch.ones(2, 3)
    for _ in range(2):
        for name in "ab":
            shards.accumulate(name, gradient, use, donate=False)
    assert torch.equal(shards.whole_gradient("a"), torch.full((2, 3), 2.0))
    assert torch.equal(shards.whole_gradient("b"), torch.full((2, 3), 2.0))
    assert torch.equal(gradient, torch.ones(2, 3))


# Refusals.


def test_what_cannot_run_is_refused_with_the_remedy() -> None:
    model, batch = build("gpt"), batch_for("gpt", ROWS)
    found = planned(model, batch, "x=1", 2, MICRO, 1)
    graph = graph_of(found, model, batch)
    with pytest.raises(RunError, match="the plan has 2 pipeline stages: lower it with lower_stages"):
        lower(found, graph)
    with pytest.raises(RunError, match="neither stages nor micro-batches: lower it with `lower`"):
        lower_stages(replace(found, schedule=None), graph)
    data = json.loads(found.to_json())
    for stage in data["schedule"]["stages"]:
        del stage["arrivals"]
    with pytest.raises(RunError, match="no placements of the tensors between its stages; plan again"):
        lower_stages(Plan.from_json(json.dumps(data)), graph)
    again = Plan.from_json(found.to_json())
    assert again.schedule == found.schedule
    staged = lower_stages(again, graph)
    staged.check()
    assert staged.digest() == lower_stages(found, graph).digest()
    assert staged.digest() != replace(staged, micro_batches=8).digest()


def test_a_batch_of_another_size_is_refused() -> None:
    value = Value(name="tokens", shape=(2, 32), dtype="int64", kind=BORDER, storage="tokens")
    rows = torch.arange(8 * 32).view(8, 32)
    assert torch.equal(micro_rows({"tokens": rows}, value, 3, MICRO), rows[6:])
    assert torch.equal(micro_rows({"tokens": rows[:2]}, value, 3, MICRO), rows[:2])  # it has no rows of the batch
    with pytest.raises(RunError, match=r"is \[6, 32\]; the plan has 4 micro-batches of \[2, 32\]: give a batch of \[8, 32\]"):
        micro_rows({"tokens": rows[:6]}, value, 0, MICRO)
