"""Moves on CUDA over NCCL; `make test-gpu`. Skipped where there is no GPU.

With fewer GPUs than ranks the ranks pose as hosts of their own; where NCCL refuses even so, the test says so.
"""

from __future__ import annotations

import copy

import pytest
import torch

from scrimp import zoo
from scrimp.chunks._optim import AdamW
from scrimp.engine import Engine, Memory
from scrimp.ext.ranks import RankFailure, RankPool, RankTimeout
from tests import jobs

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.fixture(scope="module")
def nccl() -> RankPool:
    world = max(4, torch.cuda.device_count())
    pool = RankPool(world, timeout_seconds=120, backend="nccl")
    try:
        pool.run(jobs.nccl_hello)
    except (RankFailure, RankTimeout) as error:
        pool.close()
        pytest.skip(f"NCCL does not run {world} ranks on {torch.cuda.device_count()} GPUs: {str(error)[-300:]}")
    yield pool
    pool.close()


def four_rank_cases() -> list[jobs.Case]:
    axes = {"x": 2, "y": 2}
    layouts = ["[x,-]", "[-,x]", "[x,y]", "[y,x]", "[x*y,-]", "[-,y*x]", "[-,-]", "[-,-]+x", "[y,-]+x", "[-,-]+x+y"]
    targets = [layout for layout in layouts if "+" not in layout]
    return [(axes, shape, a, b) for shape in [(8, 8), (7, 5)] for a in layouts for b in targets]


@pytest.mark.parametrize("direct", [False, True], ids=["collectives", "direct"])
def test_moves_over_nccl_equal_the_oracle(nccl: RankPool, direct: bool) -> None:
    for wrong in nccl.run(jobs.move_cases, four_rank_cases(), direct, None, "cuda"):
        assert not wrong, wrong[0]


MID = {"dim": 512, "heads": 8, "layers": 8, "vocab": 8192, "seq": 256}


def gpt_and_batches(steps: int = 6) -> tuple[torch.nn.Module, list[tuple[torch.Tensor, ...]]]:
    torch.manual_seed(0)
    return zoo.build("gpt-tiny", **MID), [zoo.example_batch("gpt-tiny", batch=8, step=k, **MID) for k in range(steps)]


@pytest.mark.parametrize("recompute", ["none", "all"])
def test_the_engine_trains_within_a_cap_and_follows_plain_pytorch(recompute: str) -> None:
    model, batches = gpt_and_batches()
    plain = copy.deepcopy(model).cuda()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3, eps=1e-5)
    losses = []
    for batch in batches:
        loss = plain(*(tensor.cuda() for tensor in batch))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    full = torch.cuda.max_memory_allocated()
    del plain, optimizer, loss
    torch.cuda.empty_cache()
    engines = []
    for share in (1.0, 0.8 if recompute == "none" else 0.35):
        torch.cuda.reset_peak_memory_stats()
        cap = int(full * share)
        engine = Engine(
            copy.deepcopy(model),
            optimizer=AdamW(lr=1e-3, eps=1e-5),
            memory=Memory(device=cap),
            precision="fp32",
            recompute=recompute,
        )
        base = torch.cuda.memory_reserved()
        got = [float(engine.step(*batch)) for batch in batches]
        assert got == pytest.approx(losses, rel=2e-4)
        assert torch.cuda.max_memory_reserved() <= cap + base
        assert engine.ledger.peak_nbytes <= cap
        engines.append(engine.state_dict())
        engine.close()
        del engine
        torch.cuda.empty_cache()
    worst = max(float((engines[0][k] - engines[1][k]).abs().max()) for k in engines[0])
    assert worst < 1e-4
