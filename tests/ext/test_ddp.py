"""The DDP door: with everything sent it is DDP; with little sent replicas stay equal and nothing is lost."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from scrimp.errors import RunError
from scrimp.exchange._bucket import HEADER, plan_bucket, put_part, row_error, seal
from scrimp.exchange._error_feedback import ErrorFeedback, Momentum
from scrimp.exchange._residual import RESIDUAL_KINDS, residual, residual_nbytes
from scrimp.exchange._row_topk import row_topk
from scrimp.ext.ddp import SparseState
from scrimp.ext.ranks import RankFailure, pool
from tests.exchange.test_row_topk import drawn
from tests.rank_jobs import ddp as jobs

CPU = torch.device("cpu")


def kept_of(numel: int, momentum: float) -> ErrorFeedback:
    states = [torch.zeros(numel)] if momentum else []
    rule, rest = Momentum(momentum=momentum), residual("fp32", numel, CPU)
    return ErrorFeedback(rule=rule, states=states, rest=rest, numel=numel, masking=False)


@pytest.mark.parametrize("world", [2, 4])
def test_with_everything_sent_it_is_ddp(world: int) -> None:
    """Through packets, momentum and all: every bit with two ranks; with more they are summed in another order."""
    settings = {"density": 1.0, "values": "fp32", "masking": False, "small": 300, "momentum": 0.9}
    want = pool(world).run(jobs.dense, "gpt-tiny", 6, 0.9, timeout_seconds=300)[0]
    for state, _ in pool(world).run(jobs.sparse, "gpt-tiny", 6, settings, timeout_seconds=300):
        for key, value in want.items():
            if world == 2:
                assert torch.equal(state[key], value), key
            else:
                assert float((state[key] - value).abs().max() / value.abs().max()) <= 1e-6, key


@pytest.mark.parametrize("kind", RESIDUAL_KINDS)
def test_replicas_stay_equal_and_learn(kind: str) -> None:
    settings = {"density": 0.02, "residual": kind, "small": 300, "warm_up": 10}
    answers = pool(2).run(jobs.sparse, "gpt-tiny", 60, settings, timeout_seconds=300)
    for key, value in answers[0][0].items():
        assert torch.equal(answers[1][0][key], value), key
    losses = answers[0][1]
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])


@pytest.mark.parametrize("kind", RESIDUAL_KINDS)
def test_saved_and_resumed_it_goes_on_as_it_was(kind: str) -> None:
    """What is rounded at random goes on with other random numbers, and so not to the bit."""
    settings = {"density": 0.05, "residual": kind, "small": 300}
    want = pool(2).run(jobs.sparse, "gpt-tiny", 8, settings, timeout_seconds=300)
    got = pool(2).run(jobs.sparse, "gpt-tiny", 8, settings, 4, timeout_seconds=300)
    if kind == "int8":
        assert got[0][1] == pytest.approx(want[0][1], rel=0.02)
    else:
        assert got[0][1] == want[0][1]


def test_a_nan_on_one_rank_is_seen_on_all_and_poisons_nothing() -> None:
    """The others keep their gradients of that step for later."""
    answers = pool(2).run(jobs.not_finite, "gpt-tiny", timeout_seconds=300)
    for seen, before, after, fine in answers:
        assert seen
        assert fine
        assert before.keys() == after.keys()
        assert all(value.isfinite().all() for value in after.values())
    _, before, after, _ = answers[1]
    assert all(torch.equal(after[name], value) for name, value in before.items())


@pytest.mark.parametrize(("byte", "words"), [(HEADER + 3, "checksum"), (0, "bytes"), (8, "is of step")])
def test_a_packet_that_was_changed_names_its_rank(byte: int, words: str) -> None:
    with pytest.raises(RankFailure, match=f"(?s)step 1, .*the packet of rank 1 .*{words}"):
        pool(2).run(jobs.corrupt, "gpt-tiny", 1, byte, timeout_seconds=60)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"density": 0}, "density=0"),
        ({"density": 1.5}, "density=1.5"),
        ({"values": "int4"}, "values='int4'"),
        ({"momentum": 1.0}, "momentum=1.0"),
    ],
)
def test_settings_that_make_no_sense(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(RunError, match=words):
        SparseState(nn.Linear(2, 2), **settings)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_nothing_is_lost_in_fp32(momentum: float) -> None:
    """What was sent and what is left is what was accumulated, in a sum of fp64 beside it."""
    numel, how = 70_000, row_topk(70_000, 0.01)
    kept = kept_of(numel, momentum)
    u, total, sent = torch.zeros(numel), torch.zeros(numel, dtype=torch.float64), torch.zeros(numel, dtype=torch.float64)
    for step in range(20):
        gradient = drawn(numel, step, spread=1.0)
        u = u * momentum + gradient
        total += u
        kept.add(gradient, 1.0)
        positions, values = kept.send(how, torch.bfloat16, 1.0)
        sent[positions] += values.double()
    left = kept.rest.tensors["values"].double()
    assert float((sent + left - total).abs().max() / total.abs().max()) < 1e-6


@pytest.mark.parametrize(("kind", "most"), [("fp32", 1e-6), ("bf16", 0.02), ("int8", 0.02)])
def test_how_far_what_is_kept_drifts(kind: str, most: float) -> None:
    """Of a sum of small additions over 400 steps, nothing of which is sent: relative error of the whole."""
    numel = 6400
    kept, total = residual(kind, numel, CPU), torch.zeros(numel, dtype=torch.float64)
    span = slice(0, numel)
    for step in range(400):
        values = 0.01 * drawn(numel, step, spread=0.0) + 0.01
        total += values
        kept.write(span, kept.read(span).add_(values))
    error = float((kept.read(span).double() - total).mean() / total.mean())
    assert abs(error) < most
    assert sum(tensor.nbytes for tensor in kept.tensors.values()) == residual_nbytes(kind, numel)


def test_micro_batches_are_added_to_what_is_there() -> None:
    numel, how = 1000, row_topk(1000, 1.0)
    parts = [drawn(numel, k) for k in range(3)]
    one, other = (kept_of(numel, 0.5) for _ in range(2))
    for k, part in enumerate(parts):
        one.add(part, 1.0, first=k == 0)
    other.add(parts[0] + parts[1] + parts[2], 1.0)
    torch.testing.assert_close(one.send(how, torch.float32, 1.0)[1], other.send(how, torch.float32, 1.0)[1])


def test_a_row_says_what_is_wrong_with_it() -> None:
    bucket = plan_bucket([("small", 10), ("large", 5000)], 0.01, torch.bfloat16)
    row = bucket.row(CPU)
    put_part(row, bucket.parts[0], None, torch.ones(10), torch.bfloat16)
    seal(row, 7, finite=True)
    assert row_error(row, 7) is None
    assert "is of step 7, and this is step 8" in str(row_error(row, 8))
    for byte in range(HEADER, row.numel()):
        row[byte] ^= 1
        assert "checksum" in str(row_error(row, 7))
        row[byte] ^= 1
