"""What a step must take at least, and where the rest of it went: the arithmetic, by hand, and an engine's own account."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import pytest
import torch

from scrimp import zoo
from scrimp.chunks.schedule.rates import Copies, HostUpdate, measure_rates
from scrimp.chunks.tables.optimizers import AdamW
from scrimp.chunks.worker.stopwatch import Stopwatch
from scrimp.chunks.worker.worker import Worker
from scrimp.cluster import Cluster, Machine
from scrimp.engine import Engine, Memory
from scrimp.engine.observe.bound import Bound, Load
from scrimp.engine.schedule import probe
from scrimp.engine.step.timing import STEPS, Timing

CPU = torch.device("cpu")
MACHINE = Machine(
    device="some GPU", threads=16, flops=6e14, up=50.0, down=50.0, up_both=40.0, down_both=40.0,
    host_update=160.0, host_update_copying=60.0, device_memory=4e3,
)  # fmt: skip
# 7 parameters of 2 bytes, of which 2 come again; see facts: least traffic is 2 bytes down and 2 to 4 up.
LOAD = Load(
    forward_seconds=0.2, backward_seconds=0.6, device_update_seconds=0.05, fresh_nbytes=14, again_nbytes=4, down_nbytes=14,
    update_nbytes=196,
)  # fmt: skip


DISK = {"disk read": 2.0, "disk write": 2.5}


def bound_of(load: Load, *, checked: bool, seconds: float, busy: float, waited: float) -> Bound:
    return Bound(
        up_nbytes=18, down_nbytes=14, least_up_nbytes=18, least_down_nbytes=14,
        own=load.phases(MACHINE, 128.0, checked=checked, charged=False),
        physical=load.phases(MACHINE, MACHINE.host_update, checked=checked, charged=True),
        overlapped=load.overlapped(checked=checked), own_rate=128.0, machine=MACHINE,
        seconds=seconds, busy_seconds=busy, waited_seconds=waited,
    )  # fmt: skip


def test_everything_overlapped_takes_the_longest() -> None:
    bound = bound_of(LOAD, checked=False, seconds=1.7, busy=1.6, waited=0.8)
    assert bound.least_seconds == pytest.approx(196 / 128)
    assert bound.physical_seconds == pytest.approx(228 / 160)
    assert bound.terms["compute"] == pytest.approx(0.85)
    assert bound.terms["copies up"] == pytest.approx(18 / 50)
    assert bound.terms["copies both ways"] == pytest.approx(14 / 40 + 4 / 50)
    slow = replace(LOAD, backward_seconds=3.0, disk=DISK)
    assert bound_of(slow, checked=False, seconds=4.0, busy=1.6, waited=0.0).least_seconds == pytest.approx(3.25)
    assert bound_of(replace(LOAD, disk=DISK), checked=False, seconds=9.0, busy=1.0, waited=0.0).least_seconds == 2.5


def test_what_is_judged_first_updates_only_beside_the_forward() -> None:
    bound = bound_of(LOAD, checked=True, seconds=2.3, busy=1.6, waited=1.3)
    assert bound.least_seconds == pytest.approx(0.6 + 196 / 128)
    assert bound.physical_seconds == pytest.approx(0.6 + 210 / 160)  # what goes down has gone before
    copying = replace(LOAD, down_nbytes=80, update_nbytes=1)
    least = bound_of(copying, checked=True, seconds=3.0, busy=0.1, waited=0.0).least_seconds
    assert least == pytest.approx(MACHINE.copy_seconds(4, 80) + 14 / 50)
    spilled = bound_of(replace(LOAD, disk=DISK), checked=True, seconds=3.0, busy=1.6, waited=0.0)
    assert spilled.least_seconds == pytest.approx(0.6 + 2.0)  # writing goes on beside the backward
    assert spilled.terms["disk write"] == 2.5
    long = replace(LOAD, disk={"disk read": 2.0, "disk write": 7.0})
    assert bound_of(long, checked=True, seconds=8.0, busy=1.6, waited=0.0).least_seconds == 7.0


def test_the_end_of_the_forward_waits_for_the_hosts_last_update() -> None:
    ending = replace(LOAD, end_seconds=0.1)
    for checked, before in ((False, 0.0), (True, 0.6)):
        bound = bound_of(ending, checked=checked, seconds=2.4, busy=1.6, waited=1.0)
        assert bound.least_seconds == pytest.approx(before + 196 / 128 + 0.1)
        assert "then the forward's end" in str(bound)
    assert bound_of(replace(ending, update_nbytes=0), checked=False, seconds=1.0, busy=0.0, waited=0.0).least_seconds == 0.85


@pytest.mark.parametrize("checked", [False, True])
def test_both_accounts_add_up_to_the_gap(checked: bool) -> None:
    bound = bound_of(LOAD, checked=checked, seconds=2.4, busy=1.7, waited=1.1)
    gap = bound.gap
    assert gap["all"] == pytest.approx(2.4 - bound.least_seconds)
    assert gap["host, slower than usual"] == pytest.approx(1.7 - 196 / 128)
    for whose in ("host", "device"):
        assert sum(seconds for name, seconds in gap.items() if name.startswith(whose)) == pytest.approx(gap["all"])
    for words in ("2.400 s", "16 threads", "GB/s", "physically", "gap", *gap):
        assert words in str(bound), str(bound)


def test_without_updates_on_the_host_only_the_device_has_an_account() -> None:
    bound = bound_of(replace(LOAD, update_nbytes=0), checked=False, seconds=1.0, busy=0.0, waited=0.0)
    assert not [name for name in bound.gap if name.startswith("host")]


def test_an_engine_says_where_its_seconds_went() -> None:
    for skip in (False, True):
        torch.manual_seed(0)
        engine = Engine(
            zoo.build("gpt-tiny", tie=False), optimizer=AdamW(), memory=Memory(device="1GiB"), device="cpu", skip_nonfinite=skip,
        )  # fmt: skip
        engine._run.planning.rates = replace(engine._run.planning.rates, device=1.0)  # so that homes stay on the host
        busy = 0.0
        for step in range(8):
            engine.step(*zoo.example_batch("gpt-tiny", batch=4, step=step))
            busy += engine._run.host_seconds[0]
        state = torch.get_rng_state()
        bound = engine.bound()
        assert torch.equal(torch.get_rng_state(), state)  # measuring draws no random numbers of the run's
        assert len(bound.own) == 1 + skip
        seen = [*engine._run.planning._recent_updates]  # the last one may have come after the bound
        assert min(seen) <= bound.own_rate <= max(seen)
        assert engine._run.residents.timing.whole is not None
        assert 0 < sum(engine._run.residents.timing.whole) < 10 * bound.seconds
        assert bound.terms["compute"] >= sum(engine._run.residents.timing.whole)
        assert bound.physical_seconds <= bound.least_seconds
        ending = bound.terms["host update, then the forward's end"] - bound.terms["host update"]
        assert ending == pytest.approx(engine._run.residents.timing.best[len(engine._run.store.placements) - 1])  # the head's
        assert busy > 0  # in one step it may be 0: a small update can end before its step, and the next begin after it
        assert bound.busy_seconds == engine._run.host_seconds[0]
        assert bound.waited_seconds >= 0
        assert bound.gap["all"] == pytest.approx(bound.seconds - bound.least_seconds)
        assert engine.bound().machine is bound.machine


def test_a_stopwatch_is_read_while_it_runs() -> None:
    watch = Stopwatch()
    assert watch.seconds == 0
    with watch:
        time.sleep(0.02)
        inside = watch.seconds
    assert 0.02 <= inside <= watch.seconds
    after = watch.seconds
    time.sleep(0.01)
    assert watch.seconds == after


def test_a_worker_knows_how_long_it_worked_and_was_waited_for() -> None:
    worker, hold = Worker("work"), threading.Event()
    gate = worker.submit(0, lambda: (hold.wait(5), None)[1])
    threading.Timer(0.05, hold.set).start()
    gate.wait()
    gate.wait()
    busy, waited = worker.lap()
    assert 0.03 < busy < 5
    assert 0.03 < waited < 5
    assert worker.lap() == (0.0, 0.0)
    worker.close()


def test_compute_is_timed_between_the_coming_and_going_of_layers() -> None:
    timing = Timing(CPU)
    timed = []
    for step in range(40):
        timing.begin(tracing=step == 0)
        for backward in (False, True, True):
            timing.resume(backward=backward)
            time.sleep(0.001)
            timing.pause()
            time.sleep(0.002)  # layers come and go
        timing.pause()
        timed += [step] if timing._schedule_steps else []
        timing.end()
        assert (timing.whole is None) == (step == 0)
    assert timed == [1, 2, STEPS, 4, 8, 16, 32]
    assert timing.whole is not None
    forward, backward = timing.whole
    assert 0.001 <= forward < backward
    assert backward < 0.1


def test_the_quick_look_is_quick_and_right_to_an_order() -> None:
    measure_rates.cache_clear()
    measure_rates(CPU)
    measure_rates.cache_clear()
    start = time.perf_counter()
    rates = measure_rates(CPU)
    assert time.perf_counter() - start < 2  # on a busy machine; alone it is tens of milliseconds
    assert rates.up == rates.down == rates.host / 2
    assert 1e8 < rates.host < 1e13
    up, down = Copies(CPU, 1 << 20).rates(up=2)
    assert up > 0
    assert down == 0


def test_the_measured_update_is_the_kernels() -> None:
    update = HostUpdate(1000)
    before = update._piece.master.clone()
    update.run()
    assert not torch.equal(update._piece.master, before)
    assert torch.equal(update._piece.weight, update._piece.master.to(torch.bfloat16))
    assert update.nbytes == 28_000


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_is_measured_and_its_engine_accounts_for_its_steps() -> None:
    start = time.perf_counter()
    machine = Cluster.probe("cuda").machine
    took = time.perf_counter() - start
    assert machine is not None
    print("\n".join(f"{name}: {figure}" for name, figure in machine.rows()), f"\nin {took:.1f} s")
    assert took < 6
    assert 1e12 < machine.flops < 1e16
    assert machine.up_both <= 1.1 * machine.up
    assert machine.down_both <= 1.1 * machine.down
    assert machine.host_update_copying <= 1.1 * machine.host_update
    assert machine.device_memory > machine.up
    measure_rates.cache_clear()
    start = time.perf_counter()
    measure_rates(torch.device("cuda", torch.cuda.current_device()))
    assert time.perf_counter() - start < 0.3
    for skip in (False, True):
        model = zoo.build("gpt-tiny", dim=512, heads=8, layers=8, vocab=8192, seq=256)
        engine = Engine(model, optimizer=AdamW(), memory=Memory(device="600MiB"), device="cuda", skip_nonfinite=skip)
        for step in range(12):
            engine.step(*zoo.example_batch("gpt-tiny", batch=8, step=step, vocab=8192, seq=256))
        probe._machines.clear()  # so that it is measured under the engine's cap, beside the engine's layers
        bound = engine.bound()
        print(bound)
        assert engine.ledger.peak_nbytes <= 600 << 20  # measuring is not the model's
        assert bound.physical_seconds <= bound.least_seconds
        ending = bound.terms["host update, then the forward's end"] - bound.terms["host update"]
        last = max(
            k
            for k, placement in enumerate(engine._run.store.placements)
            if placement.tier == "host" and placement.weights.numel()
        )
        assert ending == pytest.approx(sum(seconds for k, seconds in engine._run.residents.timing.best.items() if k >= last))
        assert bound.gap["all"] == pytest.approx(bound.seconds - bound.least_seconds)
        engine.close()
