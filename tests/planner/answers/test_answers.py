"""What a plan answers: why, what differs, what if."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch

from scrimp import Cluster, FitError, Plan, PlanError, ScrimpError, plan, zoo
from scrimp.planner import api
from scrimp.planner.answers.find import known_names
from scrimp.planner.answers.what_if import Change, change_of
from scrimp.planner.solver.next_best import held_at
from scrimp.planner.solver.solve import solve

BATCH = 16


def two_nodes() -> Cluster:
    """Of two processes each."""
    one = Cluster.preset("2xCPU")
    assert one.hardware is not None
    return Cluster(hardware=replace(one.hardware, nodes=2))


@cache
def planned(layers: int = 2, mesh: str | None = "x=4", objective: str = "memory", nodes: int = 1) -> Plan:
    with torch.device("meta"):
        model = zoo.build("gpt-tiny", layers=layers)
    cluster = Cluster.preset("4xCPU") if nodes == 1 else two_nodes()
    return plan(
        model, zoo.example_batch("gpt-tiny", BATCH), cluster, mesh=mesh, objective=objective, activations=("keep",), gap=1e-4
    )


@pytest.fixture
def captured_once(monkeypatch: pytest.MonkeyPatch) -> Callable[[Plan], Plan]:
    """From here on nothing is captured."""

    def then(found: Plan) -> Plan:
        def refuse(*args: object) -> None:
            raise AssertionError("the model was captured again")

        monkeypatch.setattr(api, "capture", refuse)
        return found

    return then


# Why.


def test_a_weight_is_explained() -> None:
    found = planned()
    told = found.explain("blocks.1.mlp.up.weight")
    (group,) = told.groups
    assert group.layers == ("blocks.1",)
    split, rest = group.choices
    assert (split.what, rest.what) == ("split", "at rest")
    (weight,) = (w for layers in found.layers for w in layers.weights if w.name == "blocks.1.mlp.up.weight")
    assert rest.chosen[0] == f"blocks.1.mlp.up.weight {weight}"
    for choice in group.choices:
        assert choice.next_best is not None
        assert choice.next_best.chosen != choice.chosen
        # It may be better by what the plan's own gap leaves open, and by no more.
        assert choice.next_best.peak_nbytes >= 0
        if choice.next_best.peak_nbytes == 0:
            assert choice.next_best.seconds >= -1e-4 * found.seconds
    text = str(told)
    for words in ("or else", "blocks.1.mlp.up: t, addmm, view", "more a step", "at peak", "The peak is", " save at least "):
        assert words in text


def test_the_next_best_is_a_choice_that_can_be_made_and_costs_what_is_said() -> None:
    """Asked for in another way: all ways to split but the next best's are forbidden."""
    found = planned()
    (group,) = found.explain("blocks.0.mlp.up").groups
    split = group.choices[0]
    assert split.next_best is not None
    source = found.source
    ((where, _),) = known_names(source.assembly)["blocks.0.mlp.up"].items()
    node = source.assembly.nodes[where]
    others = []
    for p, seconds in enumerate(source.problem.nodes[node].seconds):
        if p != source.solution.choice[node]:
            only = replace(
                source.problem.nodes[node],
                seconds=tuple(seconds if k == p else float("inf") for k in range(len(source.problem.nodes[node].seconds))),
            )
            nodes = (*source.problem.nodes[:node], only, *source.problem.nodes[node + 1 :])
            result = solve(replace(source.problem, nodes=nodes), gap=1e-4)
            others.append((result.peak_nbytes - found.memory.peak_nbytes, result.seconds - found.seconds))
    best = min(others)
    assert split.next_best.peak_nbytes == best[0]
    assert split.next_best.seconds == pytest.approx(best[1], abs=2e-3 * found.seconds)


def test_layers_that_choose_together_are_named() -> None:
    found = planned(5)
    (group,) = found.explain("blocks.1.attention.qkv", time_limit=1e-3).groups
    assert group.layers == ("blocks.0", "blocks.1")
    assert [choice.why_none for choice in group.choices] == ["not searched: the time was up"] * 2
    assert "blocks.0, blocks.1: 2 that choose together" in str(found.explain("blocks.0.attention.qkv", time_limit=1e-3))


def test_a_module_and_a_layer_are_all_their_groups() -> None:
    found = planned()
    names = known_names(found.source.assembly)
    inside = {name for name in names if name.startswith("blocks.1.") and not name.endswith(("weight", "bias"))}
    assert inside >= {"blocks.1.attention", "blocks.1.attention.qkv", "blocks.1.mlp.down", "blocks.1.norm1"}
    assert {where for name in inside for where in names[name]} <= {*names["blocks.1"]}
    assert len(names["blocks.1"]) > len(names["blocks.1.attention"]) > len(names["blocks.1.attention.qkv"]) == 1
    told = found.explain("blocks.1.attention", time_limit=1e-3)
    assert told.groups[0].name.partition(":")[0] == "blocks.1.attention.qkv"


def test_what_all_groups_hold_is_the_peak() -> None:
    found = planned()
    source = found.source
    own = copies = 0
    for where, node in source.assembly.nodes.items():
        rest = [source.assembly.rest[where]] if where in source.assembly.rest else []
        kinds, moved = held_at(source.problem, source.solution.choice, source.solution.point, [node, *rest])
        own, copies = own + sum(kinds.values()), copies + moved
    assert own + copies // 2 == found.memory.peak_nbytes


def test_a_name_that_is_not_known_lists_those_that_look_like_it() -> None:
    with pytest.raises(PlanError, match=r"no weight, module or layer 'blocks\.1\.mlp\.upp\.weight'.*blocks\.1\.mlp\.up\.weight"):
        planned().explain("blocks.1.mlp.upp.weight")
    with pytest.raises(PlanError, match=r"'qkv'.*blocks\.0\.attention\.qkv"):
        planned().explain("qkv")
    with pytest.raises(PlanError, match="there are"):
        planned().explain("?!")


def test_a_plan_from_a_file_cannot_explain_itself() -> None:
    loaded = Plan.from_json(planned().to_json())
    with pytest.raises(PlanError, match="plan again"):
        loaded.explain("blocks.0")
    with pytest.raises(PlanError, match="plan again"):
        loaded.what_if("+2MiB")


# What differs.


def test_a_plan_does_not_differ_from_itself() -> None:
    found = planned()
    same = found.diff(Plan.from_json(found.to_json()))
    assert not same
    assert str(same) == "no difference"
    assert not planned(5).diff(planned(5))


def test_plans_that_differ_are_compared_layer_by_layer() -> None:
    one, other = planned(5), planned(5, "x=4", "time")
    there, back = one.diff(other), other.diff(one)
    figures = {row.what: row for row in there.figures}
    assert figures["objective"].one == "memory"
    assert figures["peak"].more.startswith("+")
    assert figures["step"].more.startswith("-")
    assert [(layers.first, layers.count) for layers in there.layers] == [(layers.first, layers.count) for layers in back.layers]
    told = {first + k for first, count in ((layers.first, layers.count) for layers in there.layers) for k in range(count)}
    expanded = [[(part, k) for part in each.layers for k in range(part.count)] for each in (one, other)]
    for index, ((a, _), (b, _)) in enumerate(zip(*expanded, strict=True)):
        alike = a.ops == b.ops and [str(w) for w in a.weights] == [str(w) for w in b.weights]
        assert (index not in told) == alike
    assert "->" in there.text()


def test_layers_that_differ_alike_are_said_once() -> None:
    one = planned(5)
    changed = replace(
        one,
        layers=tuple(
            replace(layers, ops=tuple(replace(op, saved="offload") for op in layers.ops)) if layers.path else layers
            for layers in one.layers
        ),
    )
    (blocks,) = one.diff(changed).layers
    assert (blocks.path, blocks.count) == ("blocks.0", 5)
    assert "blocks.0 and 4 more\n  keep -> offload: what " in one.diff(changed).text()


def test_plans_of_other_models_differ_in_their_layers() -> None:
    rows = {row.what: (row.one, row.other) for row in planned().diff(planned(5)).figures}
    assert rows["layers"] == ("4", "7")
    assert planned().diff(planned(5)).layers == ()


# What if.


def test_more_memory_never_makes_it_slower(captured_once: Callable[[Plan], Plan]) -> None:
    found = captured_once(planned())
    before = found
    for more in ("+1KiB", "+4KiB", "+1MiB"):
        after = found.what_if(more)
        assert after.objective == "time"
        assert after.memory.peak_nbytes <= found.memory.peak_nbytes + change_of(more).nbytes
        assert after.seconds <= before.seconds * 1.01
        assert after.seconds <= found.seconds
        before = after
    assert before.seconds < found.seconds
    assert found.diff(before)
    # From there on it is the budget that grows or shrinks.
    least = before.what_if("-1MiB")
    assert least.memory.peak_nbytes <= found.memory.peak_nbytes
    assert least.seconds == pytest.approx(found.seconds, rel=0.01)
    assert before.what_if(f"{found.memory.peak_nbytes}").seconds == pytest.approx(least.seconds, rel=0.01)


def test_less_than_the_least_is_refused_by_operator_and_mesh() -> None:
    found = planned()
    with pytest.raises(FitError, match=r"on the mesh x=4: the least peak found is .*, at .*aten\..*too little"):
        found.what_if("-1KiB")
    with pytest.raises(PlanError, match="a device has"):
        found.what_if("-1GiB")


def test_a_node_less_takes_more_of_each_device(captured_once: Callable[[Plan], Plan]) -> None:
    found = captured_once(planned(nodes=2, mesh=None))
    assert found.mesh.size == 4
    told: list[str] = []
    less = found.what_if("-1 node", progress=told.append)
    assert less.mesh.size == 2
    assert less.objective == "memory"
    assert less.memory.peak_nbytes > found.memory.peak_nbytes
    assert any("least peak so far" in words for words in told)
    rows = {row.what: (row.one, row.other) for row in found.diff(less).figures}
    assert rows["cluster"] == ("4xCPU", "2xCPU")
    back = less.what_if("+1 node")
    assert back.memory.peak_nbytes == found.memory.peak_nbytes
    with pytest.raises(PlanError, match="what if -2 nodes: the plan is for 2 of 2 devices"):
        found.what_if("-2 nodes")


def test_another_cluster_keeps_a_mesh_that_fits_it(captured_once: Callable[[Plan], Plan]) -> None:
    found = captured_once(planned())
    fast = found.what_if("4xA100-80")
    assert fast.mesh == found.mesh
    assert fast.seconds < found.seconds
    assert found.what_if(Cluster.preset("2xCPU")).mesh.size == 2


def test_where_the_mesh_was_searched_for_it_is_again() -> None:
    found = planned(nodes=2, mesh=None)
    more = found.what_if("+100KiB")
    given = [planned(nodes=2, mesh=mesh).what_if(f"{found.memory.peak_nbytes + 100 * 1024}") for mesh in ("x=4", "x=2,y=2")]
    assert more.seconds == pytest.approx(min(each.seconds for each in given), rel=0.01)


def test_changes_are_read() -> None:
    assert change_of(" +2 GiB") == Change(nbytes=2 << 30, sign="+")
    assert change_of("-4GiB") == Change(nbytes=4 << 30, sign="-")
    assert change_of("24GiB") == Change(nbytes=24 << 30)
    assert change_of("-1 node") == Change(nodes=-1)
    assert change_of("+2 nodes") == Change(nodes=2)
    assert change_of("16xH100").cluster == Cluster.preset("16xH100")
    with pytest.raises(PlanError, match=r"what if 'more'.*'\+2GiB'"):
        change_of("more")
    with pytest.raises(ScrimpError, match="kinds are"):
        change_of("16xH1")


def test_of_several_meshes_the_nearest_is_named() -> None:
    with torch.device("meta"):
        model = zoo.build("gpt-tiny", layers=2)
    with pytest.raises(FitError, match=r"on the mesh x=.*, the nearest of 2: .*at .*aten\.") as error:
        plan(model, zoo.example_batch("gpt-tiny", BATCH), two_nodes(), memory="300KiB", activations=("keep",))
    assert error.value.least_nbytes == planned(nodes=2, mesh=None).memory.peak_nbytes


def test_stages_are_explained_each_by_itself() -> None:
    with torch.device("meta"):
        model = zoo.build("gpt-tiny", layers=2)
    found = plan(
        model,
        zoo.example_batch("gpt-tiny", 8, layers=2),
        "4xA100-80",
        mesh="x=2",
        stages=2,
        micro_batches=2,
        activations=("keep",),
    )
    said = found.explain("blocks.1.mlp.up.weight", time_limit=5)
    assert any("blocks.1.mlp.up.weight" in words for group in said.groups for each in group.choices for words in each.chosen)
    with pytest.raises(PlanError, match="nowhere"):
        found.explain("nowhere")
    with pytest.raises(PlanError, match="plan again"):
        Plan.from_json(found.to_json()).explain("blocks.1.mlp.up.weight")
    with pytest.raises(PlanError, match="stages"):
        found.what_if("+1GiB")
