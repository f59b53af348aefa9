"""`engine.resize`: other ranks go on with the bits that a checkpoint gives them, within a stated memory, or nothing changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from scrimp import Engine, zoo
from scrimp.errors import RunError
from scrimp.ext.ranks import RankPool, pool
from tests.engine.lowered.test_planned_faults import plan_of
from tests.rank_jobs.elastic import resize as jobs

ALL, PAIR, OTHERS, THREE = (0, 1, 2, 3), (0, 1), (2, 3), (0, 1, 2)


def test_an_engine_that_went_from_4_ranks_to_2_and_back_equals_one_that_kept_its_ranks() -> None:
    """To the bit, because the model's sums are exact in any order: fp64 has the same numbers."""
    phases = [(ALL, 3), (PAIR, 3), (ALL, 3)]
    moved, kept = (pool(4).run(jobs.exact, each)[0] for each in (phases, [(ALL, 9)]))
    assert moved[0] == kept[0]
    assert len({*moved[0]}) == 9
    assert moved[1].keys() == kept[1].keys()
    assert all(torch.equal(value, kept[1][key]) for key, value in moved[1].items())
    model, rows = jobs.Exact().double(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=1.0)
    for step in range(9):
        loss = model(jobs.exact_batch(step).double())
        rows.append(float(loss.detach()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert moved[0] == rows


@pytest.mark.parametrize(
    ("name", "optimizer", "settings", "phases"),
    [
        ("gpt-tiny", "adamw", {"precision": "bf16", "clip_norm": 0.5}, [(ALL, 3), (PAIR, 3), (ALL, 2)]),
        ("resnet-tiny", "sgd", {}, [(PAIR, 2), (THREE, 2), (OTHERS, 2)]),
        pytest.param("gpt-tiny", "int8", {}, [((1,), 2), (ALL, 2), (THREE, 1), ((3,), 1)], marks=pytest.mark.full),
        pytest.param("vit-tiny", "adamw", {"micro_batches": 2}, [(PAIR, 3), (THREE, 3), (ALL, 2)], marks=pytest.mark.full),
        pytest.param(
            "llama-tiny", "sgd", {"precision": "fp16", "chunk_numel": 64}, [(ALL, 2), (PAIR, 2)], marks=pytest.mark.full
        ),
    ],
)
def test_a_resize_is_a_checkpoints_save_and_load(
    name: str, optimizer: str, settings: dict[str, Any], phases: list[jobs.Phase], tmp_path: Path
) -> None:
    """Weights, states, counters and settings, and the losses and weights of the steps that follow."""
    for wrong in pool(4).run(jobs.resized, name, phases, optimizer, settings, str(tmp_path), timeout_seconds=200):
        assert not wrong


@pytest.mark.parametrize("settings", [{"chunk_numel": 2000}, {"chunk_numel": 20000, "precision": "bf16"}])
def test_a_rank_never_holds_more_than_is_promised(settings: dict[str, Any]) -> None:
    for rows in pool(4).run(jobs.bytes_held, "gpt-tiny", [ALL, PAIR, ALL, THREE, (3,), OTHERS], settings):
        for before, after, peak, largest, chunk, unknown in rows:
            assert unknown == 0
            assert max(before, after) <= peak or not max(before, after)
            assert peak <= max(before, after) + largest + chunk


def test_misuse_says_what_to_do(tmp_path: Path) -> None:
    said = pool(4).run(jobs.refused, str(tmp_path))
    outside = "this rank does not train and holds nothing; engine.resize"
    for rank in (2, 3):
        for words, call in zip(said[rank][:4], ("step", "state_dict", "save", "load"), strict=True):
            assert f"rank {rank} calls engine.{call}, and the training group is ranks 0, 1: {outside}" in words
    for rank, rows in enumerate(said):
        assert rank < 2 or rows[4] == "[]", "a rank outside has written a file"
        rest = rows[5 if rank > 1 else 0 :]
        wanted = [
            "rank 0 gave the training group [0, 1], rank 3 gave [0, 2]: give the same on every rank",
            "group=[0, 4]: give different ranks from 0 to 3",
            "group=[]: give different ranks from 0 to 3",
            "group=[0, 1, 1]: give different" if rank == 0 else "rank 0 gave a training group that is not possible",
            "rank 2 and rank 0 have different optimizer: build the Engine of every rank with the same arguments",
            "engine.resize with Sparse is not possible: every rank has residuals of its own; save a checkpoint and load it",
            "Engine(group=...) with Sparse(...) is not possible",
            "engine.resize with Memory(disk=...) is not possible",
            "the engine is closed",
        ]
        assert len(rest) == len(wanted)
        for words, part in zip(rest, wanted, strict=True):
            assert words.startswith("RunError: "), words
            assert part in words
    with pytest.raises(RunError, match="with one rank is not possible: start all ranks that may ever train, with torchrun"):
        Engine(zoo.build("gpt-tiny"), memory="1GiB", device="cpu").resize([0])


def test_a_plan_is_for_its_ranks() -> None:
    for words in pool(2).run(jobs.planned, plan_of("x=2", "zero-1")):
        assert words == (
            "engine.resize under a plan is not possible: it is for one number of ranks; save a checkpoint and load it with the "
            "other number of ranks and another plan"
        )


def test_a_rank_in_another_call_is_named() -> None:
    with RankPool(4, timeout_seconds=60, collective_timeout_seconds=3) as ranks:
        said = ranks.run(jobs.crossed)
    assert "rank 0 calls engine.resize and rank 1 calls engine.step" in said[0]


def test_groups_may_be_torchs() -> None:
    for found in pool(4).run(jobs.groups_of_torch):
        assert found == [ALL, (1, 3), (2,)]


def test_random_states_of_ranks_that_join_follow_from_those_that_stay() -> None:
    for same in (True, False):
        first, again = pool(4).run(jobs.random_states, same)[0]
        assert first == again
        assert len({*first}) == (1 if same else 4)


def test_without_room_on_the_host_nothing_changes() -> None:
    for rank, (words, same) in enumerate(pool(4).run(jobs.host_too_small)):
        assert same
        assert (
            "engine.resize([0]): the host has no room for all layers" in words
            if rank == 0
            else "rank 0 failed, and no weight has moved" in words
        )
