"""Bytes that cross between host and device, against a brute-force search over everything that could be held."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scrimp import zoo
from scrimp.chunks._residency import Moment, least_fetched_nbytes, schedule
from scrimp.engine import Engine
from scrimp.errors import FitError
from tests.test_engine import engine_for, traced_peak
from tests.traffic import least_fetched

SHAPES = {"gpt-tiny": {"layers": 4}, "llama-tiny": {"layers": 4}, "moe-tiny": {}, "vit-tiny": {}}


def trained(engine: Engine, batches: list[tuple[torch.Tensor, ...]], steps: int) -> tuple[int, int]:
    """Bytes up and down in the last of some steps."""
    for step in range(steps):
        before = (engine.store.traffic.up_nbytes, engine.store.traffic.down_nbytes)
        engine.step(*batches[step % len(batches)])
    return engine.store.traffic.up_nbytes - before[0], engine.store.traffic.down_nbytes - before[1]


@pytest.mark.parametrize("recompute", ["none", "all"])
@pytest.mark.parametrize("name", SHAPES)
def test_traffic_is_what_brute_force_finds_for_the_chosen_classes(name: str, recompute: str) -> None:
    torch.manual_seed(0)
    model = zoo.build(name, **SHAPES[name])
    batches = [zoo.example_batch(name, batch=2, step=0, **SHAPES[name])]
    free = engine_for(model, precision="bf16", recompute=recompute)
    free.step(*batches[0])
    least, weights = traced_peak(free), sum(free.store.nbytes(k) for k in range(len(free.store.flats)))
    homes = 7 * weights  # 14 bytes for each 2
    seen = []
    for extra in (0, 0.3 * weights, 0.6 * weights, weights, weights + 0.4 * homes, weights + homes):
        engine = engine_for(model, int(least + extra), precision="bf16", recompute=recompute)
        up, down = trained(engine, batches, 4)
        plan = engine.planning.current
        assert plan is not None
        assert plan.choice is not None
        sizes = [0 if engine.store.anchored(k) else engine.store.nbytes(k) for k in range(len(engine.store.flats))]
        best = least_fetched(plan.choice.moments, sizes)
        assert best <= up <= 1.05 * best
        gradients = sum(
            slot.numel * 2
            for k, layer in enumerate(engine.store.table.layers)
            for slot in layer.slots
            if slot.trainable and not engine.store.anchored(k)
        )
        assert down == gradients
        bound = engine.bound()
        assert (bound.up_nbytes, bound.down_nbytes) == (up, down)
        assert bound.least_up_nbytes <= up
        assert bound.least_down_nbytes >= gradients  # with the slots' padding
        seen.append(up + down)
    assert seen == sorted(seen, reverse=True)
    assert seen[0] >= 1.3 * seen[3]  # 6 bytes for each 2 of weights, and 4
    assert seen[-1] == 0


@st.composite
def traces(draw: st.DrawFn) -> tuple[list[Moment], list[int]]:
    count = draw(st.integers(2, 5))
    nbytes = draw(st.lists(st.integers(1, 9), min_size=count, max_size=count))
    layer = st.integers(0, count - 1)
    moments = []
    for _ in range(draw(st.integers(1, 8))):
        needs = tuple(sorted(draw(st.sets(layer, min_size=1, max_size=2))))
        room = sum(nbytes[k] for k in needs) + draw(st.integers(0, 15))
        ends = tuple(k for k in needs if draw(st.booleans()))
        moments.append(Moment(needs=needs, room_nbytes=room, ends=ends))
    return moments, nbytes


@given(traces())
def test_no_schedule_beats_brute_force_and_the_bound_is_below_both(trace: tuple[list[Moment], list[int]]) -> None:
    moments, nbytes = trace
    best = least_fetched(moments, nbytes)
    found = schedule(moments, nbytes).fetched_nbytes
    assert least_fetched_nbytes(moments, nbytes) <= best <= found


@given(traces())
def test_a_schedule_keeps_within_every_room(trace: tuple[list[Moment], list[int]]) -> None:
    """Walk through it twice, as the engine does: what is there is what was fetched, and it fits."""
    moments, nbytes = trace
    plan = schedule(moments, nbytes)
    held: set[int] = set()
    gone: set[int] = set()
    fetched = 0
    for _ in range(3):
        fetched = 0
        held &= plan.keeps
        gone = set()
        for i, moment in enumerate(moments):
            gone &= {*plan.lingers[i]}
            held -= {*plan.drops[i]}
            for layer in moment.needs:
                if layer not in held:
                    held.add(layer)
                    fetched += nbytes[layer]
            for layer in plan.ahead[i]:
                assert layer not in held
                held.add(layer)
                fetched += nbytes[layer]
            assert not gone & held
            assert sum(nbytes[k] for k in held | gone) <= moment.room_nbytes
            held -= {*moment.ends}
            gone = {*moment.ends}
    assert fetched == plan.fetched_nbytes


def test_a_moment_that_cannot_fit_is_named() -> None:
    with pytest.raises(FitError, match=r"the head needs 8 B of weights, but 5 B are left"):
        schedule([Moment(needs=(0, 1), room_nbytes=5, label="the head")], [4, 4])
