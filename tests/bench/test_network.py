"""The network benchmark as far as it goes without root: what it would run, its cleaning up, its rules about counters.
With root also a network of two ranks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from math import prod
from pathlib import Path

import pytest
import torch

from bench.network import command as network
from bench.network import netns
from bench.network.case import Case
from bench.network.contenders import CONTENDERS, FP16, FP32, POWER, SPARSE, Contender
from bench.network.netns import BURST, DEVICE, FOLDER, Bytes, Net, leftovers, making, new_run, undoing
from bench.network.netns_ranks import RanksError, command, environment, run_ranks
from bench.network.results import key_of, row_of, seconds_to, table, usable, wrong

NET = Net(ranks=2, mbit=200, run="1-2-abc")
CASE = Case(mbit=200, ranks=2, layers=1, width=64, classes=10, warm_up=1, steps=2)
MACHINE = {"gpu": "a", "cpu": "b", "cores": "1", "torch": "2"}
ROOT = pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="network namespaces need root")


@pytest.mark.parametrize("change", [{"ranks": 0}, {"ranks": 251}, {"mbit": 0}, {"run": "abc"}])
def test_refused(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(change))):
        replace(NET, **change)


def test_the_commands_that_make_a_network() -> None:
    commands = making(NET)
    assert commands[:3] == [("ip", "netns", "add", f"scrimp-1-2-abc-{name}") for name in ("hub", "rank0", "rank1")]
    inside = [
        each for each in commands[3:] if each[1:3] != ("-n", NET.hub) and each[1:3] not in [("-n", NET.space(r)) for r in (0, 1)]
    ]
    assert inside == []  # nothing of the machine's own network is touched
    limited = [each[2:7] for each in commands if each[0] == "tc"]
    places = [(NET.space(0), DEVICE), (NET.hub, "port0"), (NET.space(1), DEVICE), (NET.hub, "port1")]
    assert limited == [(space, "qdisc", "add", "dev", device) for space, device in places]
    for each in commands:
        if each[0] == "tc":
            assert each[7:] == ("root", "tbf", "rate", "200mbit", "burst", str(BURST), "latency", netns.QUEUE)
    assert [each[5] for each in commands if "address" in each] == ["10.77.0.1/24", "10.77.0.2/24"]


def test_all_that_is_made_is_undone() -> None:
    made = {each[3] for each in making(NET) if each[:3] == ("ip", "netns", "add")}
    assert {each[3] for each in undoing(NET.spaces())} == made
    assert all(each[:3] == ("ip", "netns", "delete") for each in undoing(NET.spaces()))


def test_leftovers_are_those_of_dead_processes_alone() -> None:
    dead, mine = Net(ranks=2, mbit=1, run="7-8-abc"), Net(ranks=1, mbit=1, run="9-10-def")
    there = ["other", "scrimp-mine", "scrimp-a-b-c-d", *dead.spaces(), *mine.spaces()]
    assert leftovers(there, lambda pid, started: (pid, started) == (9, "10")) == dead.spaces()


@pytest.mark.skipif(sys.platform != "linux", reason="processes are looked up in /proc")
def test_a_run_names_its_process_and_when_it_began() -> None:
    pid, started, _ = new_run().split("-")
    assert int(pid) == os.getpid()
    assert netns._lives(int(pid), started)
    assert not netns._lives(int(pid), str(int(started) + 1))  # the number was given to another since
    assert new_run() != new_run()


def test_what_a_rank_is_started_with() -> None:
    assert command(NET, 1, "some.module", ["x"])[:4] == ["ip", "netns", "exec", NET.space(1)]
    assert command(NET, 1, "some.module", ["x"])[-3:] == ["-m", "some.module", "x"]
    found = environment(NET, 1)
    assert (found["RANK"], found["WORLD_SIZE"], found["MASTER_ADDR"]) == ("1", "2", "10.77.0.1")
    assert (found["GLOO_SOCKET_IFNAME"], found["OMP_NUM_THREADS"]) == (DEVICE, "1")


def test_without_root_it_is_skipped_with_the_reason(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(sys, "platform", "linux")
    assert network.main(["--commit", "now"]) == 0
    assert capsys.readouterr().out == "bench-network: skipped: network namespaces need root\n"
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr("shutil.which", lambda tool: None)
    assert netns.missing() == "there is no `ip` (of the package iproute2)"


def test_bytes_by_theory_counted_by_hand() -> None:
    """64 x 64 and 10 x 64 weights, 64 + 64 + 64 + 10 of the rest; a ring of two sends everything once."""
    assert CASE.shapes() == [(64, 64), (64,), (64,), (64,), (10, 64), (10,)]
    elements = 64 * 64 + 10 * 64 + 3 * 64 + 10
    assert [CONTENDERS[name].nbytes(CASE) for name in (FP32, FP16)] == [4 * elements, 2 * elements]
    assert CONTENDERS[POWER].nbytes(CASE) == 4 * (64 + 64 + 10 + 64 + 3 * 64 + 10)
    assert CONTENDERS[SPARSE].nbytes(CASE) == 4 * 0.01 * 64 * 64 + 2 * (10 * 64 + 3 * 64 + 10)
    assert CONTENDERS[FP32].nbytes(replace(CASE, ranks=4)) == 1.5 * 4 * elements
    assert sum(map(prod, Case(mbit=1).shapes())) >= 5_000_000


def test_everybody_has_the_same_model_and_every_rank_its_own_data() -> None:
    first, again = CASE.model().state_dict(), CASE.model().state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    (inputs, labels), *_ = CASE.data(2, 0)
    same, *_ = CASE.data(3, 0)
    other, *_ = CASE.data(2, 1)
    assert torch.equal(inputs, same[0])
    assert torch.equal(labels, same[1])
    assert not torch.equal(inputs, other[0])


def said(sent: int, checksum: str = "a") -> dict[str, object]:
    found = {"start": 10.0, "began": 11.0, "ends": [11.0, 12.0, 14.0], "losses": [3.0, 2.0, 1.0], "sent": sent}
    return {**found, "received": sent, "checksum": checksum, "resident_nbytes": 1}


def test_counters_that_cannot_be_are_told() -> None:
    theory = int(2 * CONTENDERS[FP32].nbytes(CASE))  # of two timed steps
    outside = [Bytes(theory + 100, theory, theory + 100, theory, 0)] * 2
    good = row_of([said(theory)] * 2, CASE, FP32, outside)
    assert (good["seconds"], good["ends"], good["losses"]) == ([1.0, 2.0], [1.0, 2.0, 4.0], [3.0, 2.0, 1.0])
    assert good["wrong"] == []
    assert "different replicas" in row_of([said(theory), said(theory, "b")], CASE, FP32, outside)["wrong"][0]
    assert "rank 0 sent" in wrong({**good, "sent": [theory // 2, theory]}, CASE)[0]
    assert (
        "by theory"
        in wrong(
            {**good, "sent": [10 * theory, theory], "outside": [asdict(Bytes(10 * theory, 0, 10 * theory, 0, 0))] * 2}, CASE
        )[0]
    )
    assert "the bridge got" in wrong({**good, "outside": [asdict(Bytes(theory, theory, theory // 2, theory, 0))] * 2}, CASE)[0]
    assert "received" in wrong({**good, "received": [0, 0]}, CASE)[-1]
    quick = {**good, "seconds": [1e-4, 1e-4], "theory": 1e6, "sent": [10**6] * 2, "received": [10**6] * 2}
    quick["outside"] = [asdict(Bytes(10**6, 10**6, 10**6, 10**6, 0))] * 2
    assert "more than 200 Mbit/s let through" in wrong(quick, CASE)[0]


def test_rows_are_kept_by_commit_and_machine_and_shown() -> None:
    about = {"case": asdict(CASE), "round": 0, "commit": "now", "machine": MACHINE, "when": "2026", "others": 0.5}
    figures = {
        "seconds": [1.0, 2.0],
        "ends": [1.0, 2.0, 4.0, 5.0, 6.0, 7.0],
        "losses": [3.0, 2.0, 0.4, 0.2, 0.1, 0.1],
        "wrong": ["odd"],
    }
    figures |= {"sent": [2_000_000] * 2, "theory": 1e6, "resident_nbytes": [1 << 20], "outside": [{"drops": 3}]}
    rows = [{**about, "contender": FP32, **figures}, {**about, "contender": POWER, "failed": "why\nmore"}]
    rows += [{**about, "contender": SPARSE, "skipped": "not there"}]
    assert [*usable(rows, "now", MACHINE)] == [key_of(FP32, CASE, 0)]
    assert not usable(rows, "other", MACHINE)
    assert not usable(rows, "now", {**MACHINE, "cpu": "c"})
    assert seconds_to(1.2, rows[0]) == 6.0  # averaged over five steps: 1.14 after the fifth
    assert seconds_to(0.01, rows[0]) is None
    page = table(CASE, rows)
    assert "| DDP fp32 | 1500 | 1500 to 1500 | 1.00 | 1.000 | 2.000 |" in page
    assert f"| {POWER} | why |" in page
    assert f"| {SPARSE} | not there |" in page
    assert f"WRONG: {FP32}, round 0: odd" in page
    assert "Others had 50% to 50% of the cores" in page
    assert "limits: 3." in page


def test_who_sends_little_takes_more_steps() -> None:
    def of(whole: bool) -> Contender:
        return replace(CONTENDERS[FP32], whole=whole)

    assert (of(True).steps(CASE), of(False).steps(CASE)) == (CASE.steps, CASE.longer * CASE.steps)


def test_the_time_that_others_had() -> None:
    before, after = network.Spent(10.0, 100.0, 5.0), network.Spent(20.0, 115.0, 10.0)
    assert after.by_others(before, cores=2) == 0.5  # 15 s by anybody, 5 of them ours; 20 s of two cores


# What follows makes namespaces.


def possible() -> None:
    reason = netns.missing()
    if reason is not None:
        pytest.skip(reason)


@ROOT
def test_two_ranks_talk_at_the_rate_of_their_cables(tmp_path: Path) -> None:
    possible()
    nbytes = 2 << 20
    with netns.network(ranks=2, mbit=40) as net:
        before = netns.counters(net)
        found, _ = run_ranks(net, "bench.network.line", [str(nbytes)], seconds=8)
        first, second = (now.since(then) for now, then in zip(netns.counters(net), before, strict=True))
        assert all((FOLDER / name).exists() for name in net.spaces())
    assert not any((FOLDER / name).exists() for name in net.spaces())
    assert found["mbit"] < 40 * 1.3  # the first 256 kB are not limited
    assert nbytes <= first.sent <= 1.05 * nbytes
    assert first.sent == pytest.approx(first.sent_at_hub, abs=200)  # a packet of the system's own may be on its way
    assert abs(second.received - first.sent) <= 4096
    assert second.sent < 0.1 * nbytes


@ROOT
def test_late_ranks_are_ended_and_say_where_they_stood() -> None:
    possible()
    with netns.network(ranks=2, mbit=40) as net:
        start = time.monotonic()
        with pytest.raises(RanksError, match="not done in 1 s") as caught:
            run_ranks(net, "tests.rank_jobs.network", ["wait"], seconds=1)
        assert time.monotonic() - start < 5
        assert output_of("ip", "netns", "pids", net.space(0)) == ""
        with pytest.raises(RanksError, match=r"rank 1 failed: ValueError: on purpose"):
            run_ranks(net, "tests.rank_jobs.network", ["fail"], seconds=8)
    text = str(caught.value)
    assert text.count("was ended; it printed last: here") == 2
    assert text.count("in stand_still") == 2


@ROOT
def test_nothing_is_left_after_an_exception_or_a_signal() -> None:
    possible()
    with pytest.raises(KeyError), netns.network(ranks=1, mbit=40) as net:
        raise KeyError
    assert not any((FOLDER / name).exists() for name in net.spaces())
    for number, left in ((signal.SIGTERM, False), (signal.SIGKILL, True)):
        process = subprocess.Popen([sys.executable, "-m", "tests.rank_jobs.network", "hold"], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        spaces = json.loads(process.stdout.readline())
        assert all((FOLDER / name).exists() for name in spaces)
        process.send_signal(number)
        process.communicate(timeout=8)
        assert [(FOLDER / name).exists() for name in spaces] == [left] * len(spaces)
    assert netns.missing() is None  # which makes a network, and so removes what the dead one left
    assert not any((FOLDER / name).exists() for name in spaces)


def output_of(*words: str) -> str:
    return netns.output(words).strip()
