"""Bytes that cross between host and device, against a brute-force search over everything that could be held."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scrimp import zoo
from scrimp.chunks.schedule.eviction import ScheduleStep, least_fetched_nbytes, schedule
from scrimp.engine import Engine
from scrimp.errors import FitError
from tests.engine.test_engine import engine_for, traced_peak
from tests.support.traffic import least_fetched

SHAPES = {"gpt-tiny": {"layers": 4}, "llama-tiny": {"layers": 4}, "moe-tiny": {}, "vit-tiny": {}}


def trained(engine: Engine, batches: list[tuple[torch.Tensor, ...]], steps: int) -> tuple[int, int]:
    """Bytes up and down in the last of some steps."""
    for step in range(steps):
        before = (engine._run.store.traffic.up_nbytes, engine._run.store.traffic.down_nbytes)
        engine.step(*batches[step % len(batches)])
    return engine._run.store.traffic.up_nbytes - before[0], engine._run.store.traffic.down_nbytes - before[1]


def layers_around_the_peak(engine: Engine) -> set[int]:
    """Used before and after the moment that takes most, and not in it. Where this moment takes the whole budget none of them
    can be there, so each must come twice."""
    assert engine._run.planning.current is not None
    trace = engine._run.planning.current.trace
    taken = [schedule_step.room_nbytes + sum(engine._run.store.nbytes(k) for k in schedule_step.needs) for schedule_step in trace]
    peak = taken.index(max(taken))
    before = {k for schedule_step in trace[:peak] for k in schedule_step.needs}
    after = {k for schedule_step in trace[peak + 1 :] for k in schedule_step.needs if k not in schedule_step.empty}
    return (before & after) - {*trace[peak].needs}


@pytest.mark.parametrize("recompute", ["keep", "recompute,offload"])
@pytest.mark.parametrize("name", SHAPES)
def test_traffic_is_what_brute_force_finds_for_the_chosen_classes(name: str, recompute: str) -> None:
    torch.manual_seed(0)
    model = zoo.build(name, **SHAPES[name])
    batches = [zoo.example_batch(name, batch=2, step=0, **SHAPES[name])]
    free = engine_for(model, precision="bf16", activations=recompute)
    free.step(*batches[0])
    least, weights = traced_peak(free), sum(free._run.store.nbytes(k) for k in range(len(free._run.store.flats)))
    placements = 7 * weights  # 14 bytes for each 2
    again = sum(free._run.store.nbytes(k) for k in layers_around_the_peak(free))
    every_gradient = sum(p.numel() * 2 for p in model.parameters())
    seen, ups = [], []
    for extra in (0, 0.3 * weights, 0.6 * weights, weights, weights + 0.4 * placements, weights + placements):
        engine = engine_for(model, int(least + extra), precision="bf16", activations=recompute)
        up, down = trained(engine, batches, 4)
        plan = engine._run.planning.current
        assert plan is not None
        assert plan.choice is not None
        sizes = [0 if engine._run.store.anchored(k) else engine._run.store.nbytes(k) for k in range(len(engine._run.store.flats))]
        assert up == least_fetched(plan.choice.schedule_steps, sizes)
        gradients = sum(
            slot.numel * 2
            for k, layer in enumerate(engine._run.store.table.layers)
            for slot in layer.slots
            if slot.trainable and not engine._run.store.anchored(k)
        )
        assert down == gradients
        bound = engine.bound()
        assert (bound.up_nbytes, bound.down_nbytes) == (up, down)
        assert bound.least_up_nbytes <= up
        assert bound.least_down_nbytes >= gradients  # with the slots' padding
        seen.append(up + down)
        ups.append(up)
    assert seen == sorted(seen, reverse=True)
    assert ups[0] >= weights + again
    # Here is room for all weights: each could come once. Without a GPU the least seconds are the fewest bytes.
    assert seen[3] <= weights + every_gradient
    assert seen[-1] == 0


def test_without_a_gpu_choices_do_not_depend_on_how_busy_the_machine_was() -> None:
    """The host's updates turn out ten times as fast as the first look said: then so are its copies, and nothing else changes."""
    engine = engine_for(zoo.build("gpt-tiny"))
    planning, first = engine._run.planning, engine._run.planning.rates
    for _ in range(2):  # the first one does not count
        planning.saw_update(int(10 * first.host), 1.0)
    now = planning.best_rates()
    assert now.host == pytest.approx(10 * first.host, rel=1e-6)  # bytes are whole numbers
    for name in ("up", "down", "device"):
        assert getattr(now, name) / now.host == pytest.approx(getattr(first, name) / first.host)


@st.composite
def traces(draw: st.DrawFn) -> tuple[list[ScheduleStep], list[int]]:
    count = draw(st.integers(2, 5))
    nbytes = draw(st.lists(st.integers(1, 9), min_size=count, max_size=count))
    layer = st.integers(0, count - 1)
    schedule_steps = []
    for _ in range(draw(st.integers(1, 8))):
        needs = tuple(sorted(draw(st.sets(layer, min_size=1, max_size=2))))
        room = sum(nbytes[k] for k in needs) + draw(st.integers(0, 15))
        ends = tuple(k for k in needs if draw(st.booleans()))
        schedule_steps.append(ScheduleStep(needs=needs, room_nbytes=room, ends=ends))
    return schedule_steps, nbytes


@given(traces())
def test_a_schedule_fetches_what_brute_force_finds_and_the_bound_is_below(trace: tuple[list[ScheduleStep], list[int]]) -> None:
    schedule_steps, nbytes = trace
    best = least_fetched(schedule_steps, nbytes)
    assert schedule(schedule_steps, nbytes).fetched_nbytes == best
    assert least_fetched_nbytes(schedule_steps, nbytes) <= best


def test_a_large_layer_that_will_not_fit_later_does_not_push_out_a_small_one_that_will() -> None:
    """Rooms of a step of vit-tiny in bf16. The patches are used again last, so Belady's rule dropped them for blocks.0; but
    blocks.0 had to leave too, when room was least. Both came twice."""
    nbytes = [13696, 25856, 25856, 256, 768]
    forward = [ScheduleStep(needs=(k,), room_nbytes=room) for k, room in enumerate((121877, 96229, 60597, 62509))]
    head = ScheduleStep(needs=(4,), room_nbytes=61341, ends=(4,))
    backward = [
        ScheduleStep(needs=(k,), room_nbytes=room, ends=(k,)) for k, room in ((3, 62105), (2, 45785), (1, 81369), (0, 107225))
    ]
    plan = schedule([*forward, head, *backward], nbytes)
    assert plan.fetched_nbytes == sum(nbytes) + nbytes[1]
    assert plan.drops[2] == (1,)


def test_many_layers_are_scheduled_exactly_where_they_are_equal() -> None:
    """300 blocks of 100 bytes, and ends of 30 that fit into what the blocks leave: 1,200 bytes hold 11 blocks and one end."""
    nbytes = [30, *[100] * 300, 30]
    order = range(len(nbytes))
    schedule_steps = [ScheduleStep(needs=(k,), room_nbytes=1200) for k in order]
    schedule_steps += [ScheduleStep(needs=(k,), room_nbytes=1200, ends=(k,)) for k in reversed(order)]
    assert schedule(schedule_steps, nbytes).fetched_nbytes == 2 * sum(nbytes) - 11 * 100 - 30 - 30  # the last one goes nowhere


@given(traces())
def test_a_schedule_keeps_within_every_room(trace: tuple[list[ScheduleStep], list[int]]) -> None:
    """Walk through it twice, as the engine does: what is there is what was fetched, and it fits."""
    schedule_steps, nbytes = trace
    plan = schedule(schedule_steps, nbytes)
    held: set[int] = set()
    gone: set[int] = set()
    fetched = 0
    for _ in range(3):
        fetched = 0
        held &= plan.keeps
        gone = set()
        for i, schedule_step in enumerate(schedule_steps):
            gone &= {*plan.lingers[i]}
            held -= {*plan.drops[i]}
            for layer in schedule_step.needs:
                if layer not in held:
                    held.add(layer)
                    fetched += nbytes[layer]
            for layer in plan.ahead[i]:
                assert layer not in held
                held.add(layer)
                fetched += nbytes[layer]
            assert not gone & held
            assert sum(nbytes[k] for k in held | gone) <= schedule_step.room_nbytes
            held -= {*schedule_step.ends}
            gone = {*schedule_step.ends}
    assert fetched == plan.fetched_nbytes


def test_a_moment_that_cannot_fit_is_named() -> None:
    with pytest.raises(FitError, match=r"the head needs 8 B of weights, but 5 B are left"):
        schedule([ScheduleStep(needs=(0, 1), room_nbytes=5, label="the head")], [4, 4])
