"""Fixtures. Hypothesis draws the same examples every time, so that a run that passes here passes in CI."""

from __future__ import annotations

import gc
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from scrimp.ext.ranks import RankPool, close_pools, pool

settings.register_profile("fixed", derandomize=True, deadline=None, max_examples=40)
settings.register_profile("full", derandomize=True, deadline=None, max_examples=1500)
settings.load_profile("fixed")

# Whose tests take seconds a case: of those with many cases, every third is in the sample.
SAMPLED = {
    "bench/test_memory", "checkpoint/test_checkpoint", "ext/test_ddp", "engine/update/test_disk_update", "engine/test_engine",
    "engine/schedule/test_planning", "engine/test_engine_kinds", "chunks/meter/test_cpu", "engine/test_engine_ranks",
    "move/run/test_run", "chunks/kernels/test_build", "ext/test_dtensor_plans", "planner/baselines/test_strategies",
    "engine/gradients/test_sparse", "chunks/spill/test_file", "chunks/spill/test_queue", "engine/update/test_streamed_update",
    "engine/setup/test_weight_sources", "lower/test_module",
}  # fmt: skip
# Whose cases `engine/lowered/test_planned_steps` has too, as a pairwise sample on ranks: every sixth.
RARE = {"lower/test_interpret", "lower/test_source", "lower/test_ranks", "lower/test_hf"}
# Whose tests take about a second a case: of those with many cases, every second is.
HALVED = {
    "engine/entry/test_accumulation", "capture/test_capture", "capture/trace/test_hf_patches", "capture/trace/test_depth",
    "engine/test_chunked_loss", "ext/test_dtensor", "chunks/store/test_disk_tier", "engine/step/test_parameter_hooks",
    "engine/test_hf", "engine/test_int8", "move/plan/test_cost", "chunks/kernels/test_host_update",
    "exchange/test_native_select", "planner/test_plan", "planner/test_coverage", "planner/test_families",
    "planner/pipeline/test_planner", "planner/answers/test_answers", "planner/baselines/test_closed_forms",
    "planner/large/test_large", "rules/ops/test_models", "rules/ops/test_shapes", "chunks/schedule/test_eviction",
    "zoo/test_zoo", "lower/test_checker", "cli/demo/test_demo", "lower/weights/test_buckets",
}  # fmt: skip
MANY = 4
# The files that take longest, longest first: begun last, one of them would keep one core busy while the other has nothing to do.
FIRST = (
    "engine/lowered/test_planned_steps", "faults/test_restarts", "train/test_ranks", "engine/gradients/test_sparse",
    "engine/test_engine_ranks", "move/run/test_run",
    "lower/test_interpret", "lower/test_ranks", "engine/lowered/test_planned_engine", "engine/lowered/test_planned_faults",
    "planner/test_plan", "bench/test_memory", "planner/pipeline/test_planner", "ext/test_ddp",
    "engine/test_int8", "engine/entry/test_resize",
    "chunks/kernels/test_build", "checkpoint/test_checkpoint", "engine/test_engine", "cli/demo/test_demo",
    "planner/mesh/test_search", "planner/solver/test_solve", "planner/answers/test_answers", "bench/test_gpu",
    "rules/test_dtensor", "engine/test_hf", "cli/test_cli", "cli/test_train", "ext/hf/test_trainer",
    "move/plan/test_synthesize", "capture/trace/test_hf_patches",
)  # fmt: skip


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="also the tests marked full, and more examples of each property")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--full"):
        settings.load_profile("full")


def _file(item: pytest.Item) -> str:
    """A test's file, from the folder of the tests on."""
    return item.path.relative_to(Path(__file__).parent).with_suffix("").as_posix()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    place = {name: at for at, name in enumerate(FIRST)}
    items.sort(key=lambda item: place.get(_file(item), len(FIRST)))
    if config.getoption("--full"):
        return
    tests = [(_file(item), getattr(item, "originalname", item.name)) for item in items]
    cases, seen = Counter(tests), Counter[tuple[str, str]]()
    for item, test in zip(items, tests, strict=True):
        seen[test] += 1
        third = (test[0] in SAMPLED and seen[test] % 3 != 1) or (test[0] in RARE and seen[test] % 6 != 1)
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
