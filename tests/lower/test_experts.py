"""Expert parallelism: data-parallel tokens, split experts, and all-to-alls of exactly a tile between them."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from math import prod
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from scrimp import Mesh, Plan, RunError, plan, zoo
from scrimp.capture import from_json, to_json
from scrimp.ext.ranks import pool
from scrimp.lower import Arrived, Generated, lower
from scrimp.lower.moves import local_shape, redistribute
from scrimp.lower.steps import Move
from scrimp.move import Program
from scrimp.planner import Placed, evaluate
from scrimp.planner.answers.from_solution import layers_of
from scrimp.planner.baselines.compare import baseline_plan
from tests.support.lowering.run import Ran, drawn, on_all_ranks, plainly, worst_of
from tests.support.same_experts import to_the_first_two

NAME, ROWS = "moe-tiny", 8
SETTINGS = {"experts": 8, "expert_parallel": 4}
GROUPS, BLOCKS, SLOTS = 8, 4, 64  # rows of the batch; blocks of experts; 32 tokens of a row with 2 experts each
ALL = GROUPS * BLOCKS * SLOTS * 32  # dispatched numbers, of hidden size 32
WIDE = {**SETTINGS, "dim": 256}


@cache
def planned(wide: bool, mesh: str = "x=4") -> Plan:
    """With all options of the planner."""
    settings = WIDE if wide else SETTINGS
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return plan(
            zoo.build(NAME, **settings), zoo.example_batch(NAME, ROWS, **settings), f"{Mesh.parse(mesh).size}xCPU", mesh=mesh,
            precision="fp32", time_limit=2, gap=0.05, activations={"keep"},
        )  # fmt: skip


@cache
def expert_parallel(wide: bool) -> Plan:
    """ZeRO-3 but for the experts and what is between them, whose blocks are split."""
    source, settings = planned(wide).source, WIDE if wide else SETTINGS
    data = baseline_plan(
        zoo.build(NAME, **settings), zoo.example_batch(NAME, ROWS, **settings), "4xCPU", "zero-3", mesh="x=4", precision="fp32",
        seconds=3,
    )  # fmt: skip
    assembly, choice = source.assembly, [*source.solution.choice]
    for k, part in enumerate(assembly.parts):
        for g, group in enumerate(part.model.groups):
            wanted = data.layers[k].groups[g].split
            if ".experts" in group.name:
                wanted = (group.sizes.index(BLOCKS),)
            ways, options = assembly.ways[k, g], part.model.options[g]
            node = assembly.nodes[k, g]
            choice[node] = next(
                each for each in range(len(source.problem.nodes[node].options))
                if options[ways.split_of(each)].split == wanted and ways.way_of(each) == "keep"
            )  # fmt: skip
    found = evaluate(source.problem, tuple(choice))
    layers = tuple(layers_of(assembly, SimpleNamespace(choice=tuple(choice))))  # type: ignore[arg-type]
    return replace(planned(wide), layers=layers, memory=replace(planned(wide).memory, peak_nbytes=found.peak_nbytes))


def moves_of(found: Plan, path: str) -> Iterator[tuple[bool, Move]]:
    """Of one layer, those of the backward marked so."""
    layer = next(each for each in lower(found, planned(False).source.graph).layers if each.path == path)
    for backward, program in ((False, layer.ahead), (True, layer.behind)):
        yield from ((backward, each) for each in program.steps if isinstance(each, Move))


class Recorder:
    """A communicator that keeps the programs of moves, and sends nothing."""

    mesh, rank = Mesh({"x": 4}), 0

    def __init__(self) -> None:
        self.programs: list[Program] = []

    def move(self, program: Program, local: torch.Tensor, *, donate: bool) -> torch.Tensor:
        self.programs.append(program)
        return torch.empty(program.dst.local_shape(program.shape, self.mesh, self.rank))

    def start(self, program: Program, local: torch.Tensor, *, donate: bool) -> Arrived:
        return Arrived(self.move(program, local, donate=donate))

    def all_reduce(self, tensor: torch.Tensor, how: str, axes: tuple[str, ...]) -> torch.Tensor:
        raise AssertionError("a move is no sum")


def test_tokens_travel_by_all_to_alls_of_a_tile() -> None:
    """Dispatched rows go from a split of groups to a split of blocks, and their results back. In the backward gradients do so the
    other way round, and dispatched rows go once more, for the gradients of the weights."""
    seen = [(backward, move) for backward, move in moves_of(expert_parallel(False), "blocks.0") if numel(move.before) == ALL]
    split = [(backward, *(split_of(each) for each in (move.before, move.after))) for backward, move in seen]
    there, back = ("groups", "blocks"), ("blocks", "groups")
    assert split[:2] == [(False, *there), (False, *back)]
    assert Counter(split[2:]) == Counter({(True, *there): 2, (True, *back): 1})
    for _, move in seen:
        comm = Recorder()
        redistribute(comm, torch.empty(local_shape(move.before, comm.mesh)), move.before, move.after, donate=False)
        (program,) = comm.programs
        assert [step.kind for step in program.steps] == ["all_to_all"]
        assert {program.in_numel, program.out_numel, program.peak_numel} == {ALL // 4}
        assert program.steps[0].received_numel == ALL // 4 * 3 // 4


def numel(place: Placed) -> int:
    return prod(place.shape)


def split_of(place: Placed) -> str:
    """Which of groups and blocks are split. Rows of all blocks may be one dim; a quarter of it is a block."""
    assert not place.partial
    assert place.shape[0] == GROUPS
    assert place.shape[1] in (BLOCKS, BLOCKS * SLOTS)
    return {(("x",), ()): "groups", ((), ("x",)): "blocks"}[place.dims[0][0][1], place.dims[1][0][1]]


def test_a_graph_from_a_file_needs_the_module_of_its_operators() -> None:
    texts = (planned(False).to_json(), to_json(planned(False).source.graph))
    found, graph = (text.replace("scrimp.ragged_linear.default", "scrimp.unknown.default") for text in texts)
    with pytest.raises(RunError, match=r"operator scrimp\.unknown\.default \(.*moe\.py.*\) is not registered: import the module"):
        lower(Plan.from_json(found), from_json(graph))


@pytest.mark.parametrize(("wide", "same"), [(False, False), (False, True), pytest.param(True, True, marks=pytest.mark.full)])
def test_ranks_give_the_numbers_and_the_bytes_of_the_plan(wide: bool, same: bool) -> None:
    """Also where every token of every rank goes to the experts of one rank."""
    found, settings = expert_parallel(wide), WIDE if wide else SETTINGS
    torch.manual_seed(0)
    model = zoo.build(NAME, **settings)
    if same:
        to_the_first_two(model)
    wanted = plainly(model, zoo.example_batch(NAME, ROWS, **settings))
    graph = to_json(planned(wide).source.graph)
    ran = pool(4).run("tests.rank_jobs.lowered:step", found.to_json(), graph, NAME, settings, ROWS, same)
    for loss, gradients, _, _ in ran:
        assert loss == pytest.approx(wanted.loss, rel=1e-6)
        assert worst_of(Ran(loss, gradients), wanted) < (1e-5, "")
    peak, where = max((nbytes, at) for _, _, nbytes, at in ran)
    assert (0.98 if wide else 0.95) * found.memory.peak_nbytes <= peak <= 1.01 * found.memory.peak_nbytes, where


@pytest.mark.parametrize("mesh", ["x=4", "x=2,y=2"])
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(each, marks=pytest.mark.full) for each in range(2, 12))])
def test_choices_drawn_at_random_give_the_numbers_of_one_process(seed: int, mesh: str) -> None:
    torch.manual_seed(0)
    model, batch = zoo.build(NAME, **SETTINGS), zoo.example_batch(NAME, ROWS, **SETTINGS)
    if seed % 2:
        to_the_first_two(model)
    wanted, found = plainly(model, batch), drawn(planned(False, mesh), Random(seed))
    runner: dict[str, Any] = {"runner": Generated} if seed % 4 > 1 else {}
    for each in on_all_ranks(found, planned(False, mesh).source.graph, model, batch, **runner):
        assert each.loss == pytest.approx(wanted.loss, rel=1e-6)
        assert worst_of(each, wanted) < (1e-5, "")
        assert each.peak_nbytes <= 1.01 * found.memory.peak_nbytes, each.where
