"""Moves on CUDA over NCCL; `make test-gpu`. Skipped where there is no GPU.

With fewer GPUs than ranks the ranks pose as hosts of their own; where NCCL refuses even so, the test says so.
"""

from __future__ import annotations

import pytest
import torch

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
