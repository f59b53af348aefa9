"""The thread beside the step: order, gates, and what happens when a job fails."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from scrimp import zoo
from scrimp.chunks.tables.optimizers import AdamW
from scrimp.chunks.worker.worker import Worker
from scrimp.engine import Engine, Memory
from scrimp.errors import RunError
from tests.support.reference import train_fp32


def test_the_lowest_job_first_and_every_gate_opens() -> None:
    worker, done, hold = Worker("work"), [], threading.Event()
    first = worker.submit(0, lambda: (hold.wait(5), done.append(0))[1])
    gates = [worker.submit(k, lambda k=k: done.append(k)) for k in (5, 2, 9, 1)]
    assert not first.open
    hold.set()
    for gate in gates:
        gate.wait()
    assert done == [0, 1, 2, 5, 9]
    worker.close()
    with pytest.raises(RunError, match="work is closed"):
        worker.submit(1, lambda: None)


def test_a_failure_opens_every_gate_with_its_cause() -> None:
    worker, hold = Worker("the host's update"), threading.Event()

    def fail() -> None:
        hold.wait(5)
        raise OSError("no such memory")

    gates = [worker.submit(0, fail), *(worker.submit(k, lambda: None) for k in range(1, 4))]
    hold.set()
    start = time.perf_counter()
    for gate in gates:
        with pytest.raises(RunError, match="the host's update failed: no such memory; load the last checkpoint"):
            gate.wait()
    with pytest.raises(RunError, match="no such memory"):
        worker.submit(9, lambda: None)
    assert time.perf_counter() - start < 5
    worker.close()


def test_an_update_that_fails_beside_the_step_ends_training_with_its_cause_and_a_checkpoint_goes_on(tmp_path: object) -> None:
    torch.manual_seed(0)
    engine = Engine(zoo.build("gpt-tiny"), optimizer=AdamW(), memory=Memory(device="1GiB"), device="cpu", precision="fp32")
    engine._run.planning._on_device = frozenset()
    batch = zoo.example_batch("gpt-tiny", batch=2, step=0)
    for _ in range(3):
        engine.step(*batch)
    engine.save(f"{tmp_path}/good")
    want = float(engine.step(*batch))
    engine.load(f"{tmp_path}/good")
    apply = engine._run.updating._host.apply

    def fail(*args: object, **kwargs: object) -> None:
        raise MemoryError("a page is gone")

    engine._run.updating._host.apply = fail  # type: ignore[method-assign]

    def two_steps() -> None:  # it may fail while the first is still busy
        for _ in range(2):
            engine.step(*batch)

    with pytest.raises(RunError, match=r"the host's update failed: a page is gone; load the last checkpoint"):
        two_steps()
    with pytest.raises(RunError, match="load the last checkpoint"):
        engine.state_dict()
    engine._run.updating._host.apply = apply  # type: ignore[method-assign]
    engine.load(f"{tmp_path}/good")
    assert float(engine.step(*batch)) == want


@pytest.mark.parametrize("budget", ["1GiB", "least"])
def test_updated_in_backward_bits_are_the_same(budget: str) -> None:
    """Without clipping and without looking for what is not finite, layers are updated while backward goes on."""
    torch.manual_seed(0)
    model = zoo.build("gpt-tiny", layers=4)
    batches = [zoo.example_batch("gpt-tiny", batch=2, step=k) for k in range(8)]
    want, _ = train_fp32(model, batches, lambda parameters: torch.optim.AdamW(parameters, fused=True))
    device: str | int = budget
    if budget == "least":
        probe = Engine(
            zoo.build("gpt-tiny", layers=4),
            memory=Memory(device="1GiB"),
            device="cpu",
            precision="fp32",
            activations="recompute,offload",
        )
        probe.step(*batches[0])
        plan = probe._run.planning.current
        assert plan is not None
        device = max(m.room_nbytes + sum(probe._run.store.nbytes(k) for k in m.needs) for m in plan.trace)
    engine = Engine(
        model,
        optimizer=AdamW(),
        memory=Memory(device=device),
        device="cpu",
        precision="fp32",
        activations="recompute,offload",
        skip_nonfinite=False,
    )
    engine._run.planning._on_device = frozenset()
    for batch in batches:
        engine.step(*batch)
    assert engine._run.exchanging.started
    got = engine.state_dict()
    assert all(torch.equal(got[key], value) for key, value in want.items())


class Happening:
    """As an event: happens when it is told to, and says who waited for it."""

    def __init__(self) -> None:
        self._happened = threading.Event()

    def happen(self) -> None:
        self._happened.set()

    def query(self) -> bool:
        return self._happened.is_set()

    def synchronize(self) -> None:
        assert self._happened.wait(10)


def test_no_job_waits_while_another_could_run() -> None:
    """Gradients come from the last layer to the first: the lowest that was submitted is the one that comes last."""
    worker, done = Worker("work"), []
    come = {layer: Happening() for layer in (3, 2, 1, 0)}
    gates = {layer: worker.submit(layer, lambda k=layer: done.append(k), [come[layer]]) for layer in come}
    worker.submit(1 << 30, lambda: done.append("all"), [*gates.values()])
    come[3].happen()
    gates[3].wait()
    assert done == [3]
    come[1].happen()
    come[2].happen()  # the thread waits for this one, which was to be the next
    gates[1].wait()
    gates[2].wait()
    assert sorted(done[1:]) == [1, 2]
    come[0].happen()
    gates[0].wait()
    worker.close()
    assert done[3:] == [0, "all"]


def test_an_event_that_fails_opens_every_gate_too() -> None:
    class Bad(Happening):
        def query(self) -> bool:
            raise RuntimeError("the device is gone")

    worker = Worker("work")
    gate = worker.submit(0, lambda: None, [Bad()])
    with pytest.raises(RunError, match="the device is gone"):
        gate.wait()
    worker.close()
