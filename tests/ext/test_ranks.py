"""The pool of local ranks: order, reuse, and what it says when a rank raises, hangs or dies."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from scrimp.ext.ranks import RankFailure, RankPool, RankTimeout, close_pools, pool

WORLD = 3


@pytest.fixture(scope="module", autouse=True)
def _no_pool_stays() -> Iterator[None]:
    yield
    close_pools()


def rank_and(*args: object, **kwargs: object) -> tuple[object, ...]:
    import torch.distributed as dist

    return dist.get_rank(), args, kwargs


def pid() -> int:
    return os.getpid()


def total(start: float) -> tuple[float, int]:
    import torch
    import torch.distributed as dist

    value = torch.tensor([start + dist.get_rank()])
    dist.all_reduce(value)
    return value.item(), torch.get_num_threads()


def threads() -> list[int]:
    """Of the main thread, and of another one: each asks OpenMP for its own number."""
    import torch

    with ThreadPoolExecutor(1) as other:
        return [torch.get_num_threads(), other.submit(torch.get_num_threads).result()]


def big(size: int) -> object:
    import torch
    import torch.distributed as dist

    return torch.full((size,), float(dist.get_rank()))


def raise_on(rank: int) -> str:
    import torch.distributed as dist

    if dist.get_rank() == rank:
        raise ValueError(f"no luck on {rank}")
    return "fine"


def unpicklable() -> object:
    return lambda: None


def stand_still() -> None:
    time.sleep(600)


def hang_on(rank: int) -> None:
    import torch.distributed as dist

    if dist.get_rank() == rank:
        stand_still()


def die_on(rank: int) -> None:
    import torch.distributed as dist

    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    if dist.get_rank() == 0:
        dist.barrier()  # raises, as a peer is gone
    else:
        stand_still()


def alive(pids: list[int]) -> list[int]:
    """Those that still run; one that nobody has waited for yet (a zombie) does not count."""
    found = []
    for number in pids:
        try:
            os.kill(number, 0)
            with open(f"/proc/{number}/stat") as file:
                if file.read().rpartition(")")[2].split()[0] == "Z":
                    continue
        except ProcessLookupError:
            continue
        except FileNotFoundError:
            pass  # a system without /proc
        found.append(number)
    return found


def test_results_come_in_rank_order() -> None:
    assert pool(WORLD).run(rank_and, 1, key="two") == [(rank, (1,), {"key": "two"}) for rank in range(WORLD)]
    assert pool(WORLD).run(f"{__name__}:rank_and") == [(rank, (), {}) for rank in range(WORLD)]


def test_the_pool_is_reused() -> None:
    first, second = pool(WORLD).run(pid), pool(WORLD).run(pid)
    assert first == second
    assert len({os.getpid(), *first}) == WORLD + 1


def test_all_reduce_on_one_thread_each() -> None:
    assert pool(WORLD).run(total, 1.0) == [(6.0, 1)] * WORLD


def test_large_results() -> None:
    results = pool(WORLD).run(big, 4_000_000)
    assert [(len(result), result[-1].item()) for result in results] == [(4_000_000, rank) for rank in range(WORLD)]


def test_a_failure_names_rank_and_message_and_the_pool_may_be_kept() -> None:
    ranks = pool(WORLD)
    before = ranks.run(pid)
    with pytest.raises(RankFailure) as caught:
        ranks.run(raise_on, 1, keep_after_failure=True)
    assert list(caught.value.failures) == [1]
    assert not caught.value.standing
    assert "rank 1:\nTraceback" in str(caught.value)
    assert "ValueError: no luck on 1" in str(caught.value)
    assert "ranks.py" not in str(caught.value).replace("test_ranks.py", "")
    with pytest.raises(RankFailure, match="ranks 0, 1, 2:\n") as caught:
        ranks.run(unpicklable, keep_after_failure=True)
    assert len(caught.value.failures) == WORLD
    with pytest.raises(RankFailure, match="no_such_function"):
        ranks.run(f"{__name__}:no_such_function", keep_after_failure=True)
    assert ranks.run(pid) == before


def test_a_job_that_cannot_be_sent_leaves_the_pool_open() -> None:
    with pytest.raises(Exception, match="pickle"):
        pool(WORLD).run(lambda: None)
    assert not pool(WORLD).closed


def test_a_hang_is_ended_in_time_and_says_where_it_stood() -> None:
    ranks = pool(WORLD)
    pids = ranks.run(pid)
    start = time.monotonic()
    with pytest.raises(RankTimeout) as caught:
        ranks.run(hang_on, 2, timeout_seconds=1.5)
    assert time.monotonic() - start < 30  # the rank would stand for ever; a loaded machine takes seconds for the stacks
    text = str(caught.value)
    assert list(caught.value.standing) == [2]
    assert "rank 0 finished" in text
    assert "rank 1 finished" in text
    assert "stack of rank 2" in text
    assert " in stand_still" in text
    assert " in hang_on" in text
    assert " in _" not in text
    assert ranks.closed
    assert not alive(pids)


def test_a_death_is_reported_and_pool_recovers() -> None:
    ranks = pool(WORLD)
    pids = ranks.run(pid)
    start = time.monotonic()
    with pytest.raises(RankFailure) as caught:
        ranks.run(die_on, 1, grace_seconds=1.0)
    assert time.monotonic() - start < 30  # the rank would stand for ever; a loaded machine takes seconds for the stacks
    text = str(caught.value)
    assert list(caught.value.failures) == [1, 0]
    assert list(caught.value.standing) == [2]
    assert "rank 1 died with exit code -9" in text
    assert "rank 0:\nTraceback" in text
    assert " in stand_still" in text
    assert ranks.closed
    assert not alive(pids)
    assert pool(WORLD) is not ranks
    assert pool(WORLD).run(total, 0.0) == [(3.0, 1)] * WORLD


def test_a_failure_closes_the_pool() -> None:
    ranks = pool(WORLD)
    pids = ranks.run(pid)
    with pytest.raises(RankFailure):
        ranks.run(raise_on, 0)
    assert ranks.closed
    assert not alive(pids)
    with pytest.raises(RuntimeError, match=r"closed: .*raise_on failed"):
        ranks.run(pid)


def surroundings() -> tuple[str | None, str, int]:
    print("a rank speaks")
    return os.environ.get("SCRIMP_TRIED"), os.getcwd(), os.getppid()


@pytest.mark.skipif(sys.platform != "linux", reason="ranks are forked on Linux alone")
def test_ranks_of_all_pools_are_forked_by_one_server_and_see_what_their_own_pool_sees(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = dict(os.environ)
    with RankPool(2) as ranks:
        first = ranks.run(surroundings)
    assert dict(os.environ) == before
    said = capfd.readouterr().out  # two processes write to one file: the end of a line may come after the other's words
    assert said.count("a rank speaks") == 2
    assert not said.replace("a rank speaks", "").strip()
    monkeypatch.setenv("SCRIMP_TRIED", "now")
    monkeypatch.chdir(tmp_path)
    with RankPool(1) as ranks:
        second = ranks.run(surroundings)
    assert capfd.readouterr().out == "a rank speaks\n"
    servers = {server for _, _, server in first + second}
    assert len(servers - {os.getpid()}) == 1
    assert [each[:2] for each in first + second] == [(None, first[0][1])] * 2 + [("now", str(tmp_path))]


def test_close_leaves_no_process_and_no_folder() -> None:
    with RankPool(1) as ranks:
        pids, folder = ranks.run(pid), ranks._folder
        assert os.path.isdir(folder)
    ranks.close()
    assert not alive(pids)
    assert not os.path.exists(folder)


def test_ranks_end_with_their_parent() -> None:
    # The rank is busy when its parent is killed, so the end of the pipe alone would not end it.
    program = (
        "import os, signal, sys, threading\n"
        "from scrimp.ext.ranks import RankPool\n"
        "if __name__ == '__main__':\n"
        "    ranks = RankPool(1)\n"
        "    print(ranks.run('os:getpid')[0], ranks._folder, flush=True)\n"
        "    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL)).start()\n"
        "    ranks.run('time:sleep', 600)\n"
    )
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    environment = {**os.environ, "PYTHONPATH": path}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30, check=False)
    number, folder = done.stdout.split()
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and alive([int(number)]):
        time.sleep(0.1)
    assert done.returncode == -signal.SIGKILL
    assert not alive([int(number)])
    assert not os.path.exists(folder)


def test_ranks_have_one_thread_each_whatever_the_parent_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    with RankPool(2, timeout_seconds=60) as ranks:
        assert ranks.run(threads) == [[1, 1], [1, 1]]
