"""Ctrl-C at any time leaves a step made or not made, the ledger right, and no mode on torch's stack. Closing is final."""

from __future__ import annotations

import _thread
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import _python_dispatch as dispatch

from scrimp import SGD, Engine, Memory, RunError
from scrimp.chunks.meter import dispatch_private
from scrimp.engine.step.interrupts import Interrupts
from scrimp.ext.ranks import pool
from tests.engine.step.test_parameter_hooks import Net, batches
from tests.rank_jobs import sparse as sparse_jobs


@pytest.fixture(autouse=True)
def _interruptible() -> Iterator[None]:
    """A process that was started in the background ignores SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def engine_of(**settings: Any) -> Engine:
    torch.manual_seed(0)
    return Engine(Net(), **{"memory": Memory(device="1GiB"), "device": "cpu", "optimizer": SGD(lr=0.05, momentum=0.9)} | settings)


def test_the_result_of_an_evaluation_is_a_batch() -> None:
    engine = engine_of(loss=lambda out: out)
    x = batches()[0]
    for _ in range(3):
        engine.step(x + engine.evaluate(x))
        out = engine.evaluate(x)
        held = engine.ledger.now["temporaries"]
        engine.step(out.expand(8, 16))
        assert engine.ledger.now["temporaries"] + engine.ledger.now["activations"] == held  # autograd may have saved it
        del out
    assert min(engine.ledger.now.values()) >= 0
    assert engine.ledger.now["buffers"] == engine.ledger.now["temporaries"] == engine.ledger.now["activations"] == 0


@pytest.mark.parametrize("at", ["_pop_mode", "_push_mode"])
def test_an_interrupt_while_the_meter_comes_or_goes(at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, other = engine_of(), engine_of(memory=Memory(device="100KiB"))
    true, left = getattr(dispatch, at), 1

    def interrupted(*args: Any) -> Any:
        nonlocal left
        if left:
            left -= 1
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0)  # where Python would raise it
        return true(*args)

    monkeypatch.setattr(dispatch, at, interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.step(batches()[0])
    monkeypatch.undo()
    assert not dispatch._get_current_dispatch_mode_stack()
    for each in (engine, other):
        each.step(batches()[1])


def test_a_mode_leaves_the_stack_even_if_torchs_own_exit_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise KeyboardInterrupt

    class Mode(dispatch_private.PlainMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    with Mode() as outer:
        monkeypatch.setattr(dispatch, "_pop_mode", fails)
        with pytest.raises(KeyboardInterrupt), Mode():
            pass
        monkeypatch.undo()
        assert dispatch._get_current_dispatch_mode_stack() == [outer]


@pytest.mark.parametrize("device", ["1GiB", "40KiB"])
def test_many_interrupts(device: str) -> None:
    """At random moments, from another thread. What is trained in the end is what is trained without them."""
    data = batches(6)
    plain = engine_of(memory=Memory(device=device))
    for batch in data:
        plain.step(batch)
    engine = engine_of(memory=Memory(device=device))
    over, allowed, interrupts = threading.Event(), False, 0
    pauses = (torch.rand(5000, generator=torch.Generator().manual_seed(0)) * 0.02).tolist()

    def interrupt(number: int, frame: Any) -> None:
        nonlocal allowed, interrupts
        if allowed:  # else the test itself would be hit
            allowed = False
            interrupts += 1
            raise KeyboardInterrupt

    def storm() -> None:
        for pause in pauses:
            if over.wait(pause):
                return
            _thread.interrupt_main()

    thread = threading.Thread(target=storm)
    before = signal.signal(signal.SIGINT, interrupt)
    try:
        thread.start()
        while engine.optimizer.steps < len(data):
            with suppress(KeyboardInterrupt):
                allowed = interrupts < 12
                engine.step(data[engine.optimizer.steps])
                allowed = False
            assert not dispatch._get_current_dispatch_mode_stack()
            assert min(engine.ledger.now.values()) >= 0
    finally:
        over.set()
        thread.join()
        signal.signal(signal.SIGINT, before)
    assert interrupts
    want = plain.state_dict()
    assert all(torch.equal(value, want[name]) for name, value in engine.state_dict().items())
    assert engine.ledger.now == plain.ledger.now


def kill_and_go_on(interrupts: Interrupts) -> None:
    with interrupts:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0)  # it is kept
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0)
        interrupts._since -= 60  # the step has found no place to stop for a minute
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)
        pytest.fail("the last was kept too")


def test_a_signal_waits_but_not_for_ever() -> None:
    with pytest.raises(KeyboardInterrupt):
        kill_and_go_on(Interrupts())
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


# Closing.


def threads() -> set[threading.Thread]:
    return {*threading.enumerate()}


@pytest.mark.parametrize("disk", [False, True])
def test_closing_is_final(disk: bool, tmp_path: Path) -> None:
    before = threads()
    memory = Memory(device="48KiB", host="48KiB", disk=tmp_path) if disk else Memory(device="1GiB")
    with engine_of(memory=memory) as engine:
        for batch in batches()[:3]:
            engine.step(batch)
        want = engine.state_dict()
        assert threads() - before
    assert not threads() - before  # those of earlier tests may end meanwhile
    engine.close()
    for call in (
        lambda: engine.step(batches()[0]),
        lambda: engine.evaluate(batches()[0]),
        lambda: engine.full_parameters().__enter__(),
        lambda: engine.load(tmp_path),
        engine.__enter__,
    ):
        with pytest.raises(RunError, match="the engine is closed: only its state can be read"):
            call()
    assert all(torch.equal(value, want[name]) for name, value in engine.state_dict().items())
    engine.save(tmp_path / "ckpt")
    assert threads() == before
    again = engine_of()
    again.load(tmp_path / "ckpt")
    assert again.optimizer.steps == 3


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts threads in /proc")
def test_engines_that_are_gone_leave_no_process_group() -> None:
    """Gloo's threads look for messages all the time: a process with many engines after each other would do little else."""
    for first, last in pool(2).run(sparse_jobs.threads_left, 3):
        assert last <= first
