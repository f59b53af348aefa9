"""Fixtures. Hypothesis draws the same examples every time, so that a run that passes here passes in CI."""

from __future__ import annotations

import gc
import warnings
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from scrimp.ext.ranks import RankPool, close_pools, pool

settings.register_profile("fixed", derandomize=True, deadline=None, max_examples=40)
settings.register_profile("full", derandomize=True, deadline=None, max_examples=1500)
settings.load_profile("fixed")

# Whose tests take seconds a case: of those with many cases, every third is in the sample.
SAMPLED = {
    "test_bench_memory", "test_checkpoint", "test_ddp", "test_disk_update", "test_engine", "test_engine_classes",
    "test_engine_kinds", "test_engine_meter", "test_engine_ranks", "test_move_run", "test_native_build", "test_peers",
    "test_planner_baselines", "test_sparse_engine", "test_spill", "test_spill_traffic", "test_through", "test_weights",
}  # fmt: skip
# Whose tests take about a second a case: of those with many cases, every second is.
HALVED = {
    "test_accumulate", "test_capture", "test_capture_hf", "test_capture_depth", "test_cross_entropy", "test_dtensor",
    "test_engine_disk", "test_engine_hooks", "test_hf", "test_int8", "test_move_cost", "test_native", "test_native_select",
    "test_plan", "test_plan_coverage", "test_plan_families", "test_plan_stages", "test_planner_answers",
    "test_planner_closed_forms", "test_planner_large", "test_rules_models", "test_rules_shapes", "test_traffic", "test_zoo",
}  # fmt: skip
MANY = 4
# The files that take longest, longest first: begun last, one of them would keep one core busy while the other has nothing to do.
FIRST = (
    "test_sparse_engine", "test_engine_ranks", "test_move_run", "test_plan", "test_bench_memory", "test_plan_stages", "test_ddp",
    "test_int8", "test_native_build", "test_checkpoint", "test_engine", "test_demo", "test_planner_near", "test_planner_solve",
    "test_planner_answers", "test_bench_gpu", "test_rules_dtensor", "test_hf", "test_cli", "test_move", "test_capture_hf",
)  # fmt: skip


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="also the tests marked full, and more examples of each property")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--full"):
        settings.load_profile("full")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    place = {name: at for at, name in enumerate(FIRST)}
    items.sort(key=lambda item: place.get(item.path.stem, len(FIRST)))
    if config.getoption("--full"):
        return
    tests = [(item.path.stem, getattr(item, "originalname", item.name)) for item in items]
    cases, seen = Counter(tests), Counter[tuple[str, str]]()
    for item, test in zip(items, tests, strict=True):
        seen[test] += 1
        third = test[0] in SAMPLED and seen[test] % 3 != 1
        half = test[0] in HALVED and seen[test] % 4 in (2, 3)  # 1, 4, 5, 8: of two settings that alternate both are there
        if "full" in item.keywords or (cases[test] >= MANY and (third or half)):
            item.add_marker(pytest.mark.skip(reason="in `make test-full` only"))


@pytest.fixture
def ranks8() -> RankPool:
    """Eight gloo processes, shared by all tests; remade if a test ended them."""
    return pool(8)


@pytest.fixture
def ranks4() -> RankPool:
    return pool(4)


@pytest.fixture(scope="module", autouse=True)
def _end_pools() -> Iterator[None]:
    """With their file: ranks are quickly forked again, and gloo's threads of a pool that nobody uses take a part of a core.

    What is there before the file's first test (modules, the tests themselves) is no garbage: collections need not look at it.
    """
    gc.collect()
    gc.freeze()
    yield
    close_pools()


@pytest.fixture
def _same_kernels_every_time() -> Iterator[None]:
    """What is compared is the engine: PyTorch itself must give equal bits for equal calls."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cudnn.benchmark = False
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*deterministic.*")
        yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cuda.enable_flash_sdp(True)
    torch.backends.cuda.enable_mem_efficient_sdp(True)
