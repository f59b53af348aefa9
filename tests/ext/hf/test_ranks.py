"""Two ranks: the trainer within a budget beside the plain one under DistributedDataParallel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed (it is in the dev extra)")

from safetensors.torch import load_file

import scrimp
from scrimp.exchange import Sparse
from scrimp.ext.ranks import pool
from tests.ext.hf.jobs import Result, planned, trained
from tests.ext.hf.trainers import collate_alike, model_of, rows
from tests.support.bounds import gamma

SETTINGS: dict[str, Any] = {"max_steps": 4, "max_grad_norm": 1e9, "eval_strategy": "steps"}


def two(folder: Path, door: bool, resume: Path | None = None, **more: Any) -> tuple[Result, Result]:
    settings = {**SETTINGS, "eval_steps": 2, "save_strategy": "steps", "save_steps": 2, **more.pop("settings", {})}
    where = None if resume is None else str(resume)
    first, second = pool(2).run(trained, str(folder), door, settings, more, where, timeout_seconds=300)
    return first, second


def same_but_norms(logs: list[dict[str, float]], plain: list[dict[str, float]]) -> None:
    """Norms are summed in another order: each sum has as many roundings as there are elements, at most."""
    elements = sum(parameter.numel() for parameter in model_of("llama").parameters())
    assert len(logs) == len(plain)
    for mine, theirs in zip(logs, plain, strict=True):
        assert mine.get("grad_norm", 0.0) == pytest.approx(theirs.get("grad_norm", 0.0), rel=2 * gamma(elements), abs=0)
        assert {**mine, "grad_norm": 0.0} == {**theirs, "grad_norm": 0.0}


def test_two_ranks(tmp_path: Path) -> None:
    """The mean of two gradients is rounded once in both, and nothing is clipped: losses and weights are equal to the bit."""
    (logs, state), _ = two(tmp_path / "door", True)
    (plain, want), _ = two(tmp_path / "plain", False)
    same_but_norms(logs, plain)
    assert state.keys() == want.keys()
    assert not [name for name, value in want.items() if not torch.equal(state[name], value)]
    saved = load_file(tmp_path / "door" / "saved" / "model.safetensors")
    assert all(torch.equal(saved[name], value) for name, value in want.items())


@pytest.mark.full
def test_two_ranks_accumulate_and_resume(tmp_path: Path) -> None:
    """The engine averages each micro-batch over the ranks, DDP their sum: the first step has the same loss, and the norm up to
    roundings. A resumed run is the uninterrupted one."""
    settings = {"gradient_accumulation_steps": 2}
    (logs, state), _ = two(tmp_path / "door", True, settings=settings)
    (plain, _), _ = two(tmp_path / "plain", False, settings=settings)
    same_but_norms(logs[:1], plain[:1])
    (again, after), _ = two(tmp_path / "door", True, settings=settings, resume=tmp_path / "door" / "checkpoint-2")
    assert again[:-1] == logs[:-1]
    assert not [name for name, value in state.items() if not torch.equal(after[name], value)]


@pytest.mark.full
def test_two_ranks_with_sparse_exchange(tmp_path: Path) -> None:
    """A quarter of the entries is sent in every step, and training works."""
    settings = {"max_steps": 12, "save_strategy": "no"}
    (logs, _), _ = two(tmp_path, True, settings=settings, exchange=Sparse(density=0.25))
    losses = [log["loss"] for log in logs if "loss" in log]
    assert len(losses) == 12
    assert losses[-1] < losses[0]
    assert all(log["grad_norm"] > 0 for log in logs if "grad_norm" in log)


@pytest.mark.full
def test_two_ranks_with_a_plan(tmp_path: Path) -> None:
    """Each rank's batches are gathered into the global one; the steps are those of an engine with the same plan."""
    batch = collate_alike(list(rows())[:4])
    found = scrimp.plan(model_of("llama").train(), batch, "2xCPU", mesh="x=2", precision="fp32", time_limit=5, gap=0.5)
    found.save(tmp_path / "plan.json")
    for losses, wanted, state, want in pool(2).run(planned, str(tmp_path), str(tmp_path / "plan.json"), timeout_seconds=300):
        assert losses == wanted
        assert len(losses) == 8
        assert losses[-1] < losses[0]
        assert state.keys() == want.keys()
        assert not [name for name, value in want.items() if not torch.equal(state[name], value)]
