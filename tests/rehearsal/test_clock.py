"""The step time of two queues: by hand, and by properties that hold for every order of events."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scrimp.rehearsal.clock import ENTER, MOVED, PACK, PACKED, PASS, QUEUED, RAN, STARTED, WAITED, Clock, Event, step_time


def ran(seconds: float, operators: str = "matmul", where: str = "a, forward") -> Event:
    return Event(RAN, None, seconds, where, operators)


def test_a_move_that_is_waited_for_at_once_hides_nothing() -> None:
    found = step_time([ran(2), Event(MOVED, seconds=3), ran(1)], None)
    assert (found.compute, found.communication, found.overlap, found.step) == (3, 3, 0, 6)


def test_operators_hide_a_move_that_started_before_them() -> None:
    events = [Event(STARTED, seconds=3, number=1), ran(2), Event(WAITED, number=1), ran(1)]
    found = step_time(events, None)
    assert (found.compute, found.communication, found.overlap, found.step) == (3, 3, 2, 4)


def test_moves_wait_for_each_other() -> None:
    events = [Event(STARTED, seconds=3, number=1), Event(STARTED, seconds=3, number=2), ran(4), Event(WAITED, number=2), ran(1)]
    assert step_time(events, None).step == 7
    assert step_time([Event(STARTED, seconds=3, number=1), Event(MOVED, seconds=1), ran(1)], None).step == 5


def test_measured_intervals_belong_to_what_ran_in_them() -> None:
    events = [Event(PASS, where="a, forward"), Event(QUEUED), ran(1), Event(PACK), Event(ENTER), Event(MOVED, seconds=5),
              Event(PACKED), ran(1, "norm"), Event(ENTER), Event(MOVED, seconds=5), Event(PASS, where="b, forward")]  # fmt: skip
    intervals = [0.0, 100.0, 2.0, 0.5, 100.0, 100.0, 100.0, 3.0, 0.25, 100.0, 0.125]
    found = step_time(events, intervals)
    assert found.compute == 2 + 0.5 + 3 + 0.25 + 0.125
    assert found.step == found.compute + found.communication == found.compute + 10
    (layer,) = found.layers
    assert (layer.name, layer.times, layer.predicted_seconds, layer.measured_seconds) == ("a, forward", 2, 2, found.compute)
    assert {each.name: each.measured_seconds for each in found.operators} == {"matmul": 2, "norm": 3.5}


@st.composite
def steps(draw: st.DrawFn) -> list[Event]:
    """Moves are waited for in the order in which they started, if at all."""
    events: list[Event] = []
    started = waited = 0
    for what in draw(st.lists(st.sampled_from([RAN, MOVED, STARTED, WAITED]), max_size=30)):
        seconds = draw(st.integers(0, 9))
        if what == STARTED:
            started += 1
            events.append(Event(STARTED, seconds=seconds, number=started))
        elif what == WAITED and waited < started:
            waited += 1
            events.append(Event(WAITED, number=waited))
        elif what in (RAN, MOVED):
            events.append(ran(seconds) if what == RAN else Event(MOVED, seconds=seconds))
    return events


@given(steps())
def test_a_step_is_as_long_as_its_longer_queue_and_no_longer_than_both(events: list[Event]) -> None:
    found = step_time(events, None)
    assert found.compute == sum(each.seconds for each in events if each.what == RAN)
    assert found.communication == sum(each.seconds for each in events if each.what in (MOVED, STARTED))
    assert max(found.compute, found.communication) <= found.step <= found.compute + found.communication
    assert found.overlap == found.compute + found.communication - found.step
    assert sum(each.predicted_seconds for each in found.operators) == found.compute


def test_a_clock_on_the_cpu_measures_and_one_on_meta_does_not() -> None:
    for device in ("cpu", "meta"):
        clock = Clock(torch.device(device))
        clock.begin()
        clock.begins("a, forward")
        number = clock.started(1e-9)
        clock.ran(0.5, "a, forward", "matmul")
        clock.enter()
        clock.waited(number)
        found = clock.result()
        (layer,) = found.layers
        assert layer.predicted_seconds == 0.5
        assert (layer.measured_seconds is None) == (device == "meta")
        assert found.compute == 0.5 if device == "meta" else 0 < found.compute < 0.5


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_busy_gpu_lets_the_host_go_ahead() -> None:
    """The private function of torch is there, returns at once, and keeps the GPU busy for about that long."""
    from scrimp.chunks import occupy

    device = torch.device("cuda")
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    occupy(device, 0.1)
    end.record()
    assert not end.query()
    torch.cuda.synchronize()
    assert begin.elapsed_time(end) >= 50
