"""Programs on real ranks: values, memory, dtypes, many tensors at once."""

from __future__ import annotations

import random

import pytest
import torch

from bench.move.problems import default_order_pairs
from scrimp.errors import MoveError
from scrimp.ext.ranks import RankPool
from scrimp.layout import Layout, Mesh
from scrimp.move import synthesize
from scrimp.move.plan.dtypes import ITEMSIZE
from tests.move.plan.test_synthesize import random_layout
from tests.rank_jobs import moves as jobs


def assert_all_right(answers: list[list[str]]) -> None:
    assert not any(answers), next(answer for answer in answers if answer)[0]


def sampled_pairs(every: int) -> list[jobs.Case]:
    return [(dict(p.mesh.axes), (8,) * len(p.shape), p.src, p.dst) for p in default_order_pairs()[::every]]


def random_cases(count: int, seed: int) -> list[jobs.Case]:
    """Any order, partial sums, uneven and empty tiles, size-1 axes, scalars, on 8 devices."""
    draw = random.Random(seed)
    cases: list[jobs.Case] = []
    while len(cases) < count:
        axes = draw.choice([{"x": 8}, {"x": 2, "y": 4}, {"x": 4, "y": 1, "z": 2}, {"x": 2, "y": 2, "z": 2}])
        mesh, rank = Mesh(axes), draw.randrange(0, 4)
        src, dst = random_layout(draw, mesh, rank), random_layout(draw, mesh, rank)
        free = [a for a in mesh.sub_axes if not any(a in stack for stack in src.dims)]
        src = Layout(dims=src.dims, partial=tuple(a for a in free if draw.random() < 0.3))
        shape = tuple(draw.choice([0, 1, 3, 5, 7, 8, 16]) for _ in range(rank))
        cases.append((axes, shape, str(src), str(dst)))
    return cases


@pytest.mark.parametrize("every", [11, pytest.param(3, marks=pytest.mark.full)], ids=["93", "338"])
@pytest.mark.parametrize("native", [False, True], ids=["gloo", "nccl path"])
@pytest.mark.parametrize("direct", [False, True], ids=["collectives", "direct"])
def test_pairs_on_8_ranks_equal_the_oracle(ranks8: RankPool, direct: bool, native: bool, every: int) -> None:
    assert_all_right(ranks8.run(jobs.move_cases, sampled_pairs(every), direct, native, timeout_seconds=300))


def test_moves_on_groups_that_end_and_are_made_anew(ranks8: RankPool) -> None:
    assert_all_right(ranks8.run(jobs.moves_on_groups_that_end, 12, timeout_seconds=120))


@pytest.mark.full
@pytest.mark.parametrize("direct", [False, True], ids=["collectives", "direct"])
def test_all_pairs_on_8_ranks_equal_the_oracle(ranks8: RankPool, direct: bool) -> None:
    assert_all_right(ranks8.run(jobs.move_cases, sampled_pairs(1), direct, timeout_seconds=600))


@pytest.mark.parametrize("native", [False, True], ids=["gloo", "nccl path"])
def test_random_moves_on_8_ranks_equal_the_oracle(ranks8: RankPool, native: bool) -> None:
    for direct in (False, True):
        assert_all_right(ranks8.run(jobs.move_cases, random_cases(150, seed=direct), direct, native, timeout_seconds=300))


def test_every_dtype_arrives_bit_for_bit(ranks8: RankPool) -> None:
    axes = {"x": 2, "y": 4}
    cases: list[jobs.Case] = [
        (axes, (8, 8), "[x,y]", "[y,x]"), (axes, (8, 8), "[x*y,-]", "[-,-]"), (axes, (5, 3), "[y,-]", "[-,x]"),
    ]  # fmt: skip
    names = [name for name in ITEMSIZE if hasattr(torch, name)]
    assert len(names) >= 20
    assert_all_right(ranks8.run(jobs.every_dtype, cases, names, timeout_seconds=120))


def test_sums_in_every_dtype_that_can_be_added(ranks8: RankPool) -> None:
    names = ["float32", "float64", "float16", "bfloat16", "int8", "uint8", "int16", "int32", "int64", "complex64", "complex128"]
    assert_all_right(ranks8.run(jobs.sums, names, timeout_seconds=120))


MEBI = 1 << 20
MEMORY: list[jobs.Case] = [
    ({"x": 2, "y": 4}, (2048, 1024), "[x,y]", "[y,x]"),
    ({"x": 2, "y": 4}, (2048, 1024), "[x*y,-]", "[-,x*y]"),
    ({"x": 2, "y": 4}, (2048, 1024), "[-,x*y]", "[x*y,-]"),
    ({"x": 2, "y": 4}, (2048, 1024), "[-,y]", "[-,-]"),
    ({"x": 2, "y": 4}, (2048, 1024), "[-,-]+x+y", "[x,y]"),
    ({"x": 2, "y": 4}, (2048, 1024), "[-,x]+y", "[-,-]"),
    ({"x": 2, "y": 4}, (1024, 1024), "[x,-]", "[-,-]"),
    ({"x": 2, "y": 4}, (1023, 1025), "[x,y]", "[y,x]"),
    ({"x": 8}, (5, 1 << 19), "[x,-]", "[-,-]"),
    ({"x": 8}, (9, 1 << 18), "[x,-]", "[-,x]"),
    ({"x": 8}, (9, 1 << 18), "[-,-]+x", "[x,-]"),
    ({"x": 8}, (1, 1 << 19), "[-,-]+x", "[x,-]"),
    ({"x": 2, "y": 2, "z": 2}, (128, 128, 128), "[x*y,z,-]", "[-,y*x,z]"),
]


@pytest.mark.parametrize("donate", [False, True], ids=["kept", "donated"])
@pytest.mark.parametrize("case", MEMORY, ids=lambda case: f"{case[2]} to {case[3]} of {case[1]}")
def test_real_allocation_stays_within_the_promise(ranks8: RankPool, case: jobs.Case, donate: bool) -> None:
    for direct in (False, True):
        for rank, (peak, nbytes, _, emptied) in enumerate(ranks8.run(jobs.peak_nbytes, case, donate, direct)):
            program = jobs.program_of(case, dtype="float32", direct=direct)
            largest = program.cap_numel * 4
            promise = 2 * largest + max(MEBI, largest // 8) + (0 if donate else program.in_numel * 4)
            assert peak <= promise, f"rank {rank}: {peak / MEBI:.2f} MiB, promised {promise / MEBI:.2f} MiB: {program}"
            assert emptied == (donate or nbytes == 0)


@pytest.mark.parametrize("donate", [False, True], ids=["kept", "donated"])
def test_who_must_send_more_than_a_tile_does_so_in_rounds(ranks8: RankPool, donate: bool) -> None:
    answers = ranks8.run(jobs.in_rounds, donate)
    assert max(load for _, load, _, _ in answers) > 1
    for rank, (right, _, peak, promise) in enumerate(answers):
        assert right
        assert peak <= promise, f"rank {rank}: {peak} of {promise}"


@pytest.mark.parametrize("ranks", [[[0, 1, 2, 3], [4, 5, 6, 7]], [[5, 1, 7, 3], [4, 0, 6, 2]], [[6, 1], [3, 4]]], ids=str)
def test_a_device_mesh_as_the_group(ranks8: RankPool, ranks: list[list[int]]) -> None:
    for src, dst in [("[x,y]", "[y,x]"), ("[x,-]", "[-,-]"), ("[x*y,-]", "[-,x]")]:
        assert not any(ranks8.run(jobs.on_device_mesh, (8, 8), src, dst, ranks))


def model_like(draw: random.Random) -> list[tuple[tuple[int, ...], str, str]]:
    """What re-sharding a model asks for: many tensors, few kinds of moves."""
    kinds = [("[x*y,-]", "[-,y]"), ("[x*y,-]", "[y,-]"), ("[x,y]", "[y,x]"), ("[-,-]+x", "[y,-]"), ("[x,-]", "[x,-]")]
    return [((8 * draw.randrange(1, 4), 8), *draw.choice(kinds)) for _ in range(40)]


@pytest.mark.parametrize("native", [False, True], ids=["gloo", "nccl path"])
@pytest.mark.parametrize("donate", [False, True], ids=["kept", "donated"])
def test_many_tensors_move_in_few_calls(ranks8: RankPool, native: bool, donate: bool) -> None:
    items = model_like(random.Random(1))
    steps = sum(len(synthesize(shape, Mesh({"x": 2, "y": 4}), src, dst).steps) for shape, src, dst in items)
    for answer, calls in ranks8.run(jobs.many, items, native, 1 << 30, donate):
        assert not answer, answer[0]
        assert calls <= 5 < steps
    for answer, calls in ranks8.run(jobs.many, items, native, 4096, donate):
        assert not answer, answer[0]
        assert calls > 5  # small buckets: less memory, more calls


def test_one_device_needs_no_process_group() -> None:
    mesh = Mesh({"x": 1})
    local = torch.arange(6).reshape(2, 3)
    assert synthesize((2, 3), mesh, "[x,-]", "[-,x]", dtype=torch.int64).run(local) is local
    with pytest.raises(MoveError, match=r"\(4,\).*\(2, 3\)"):
        synthesize((2, 3), mesh, "[x,-]", "[-,x]", dtype=torch.int64).run(torch.arange(4))


def test_without_a_process_group_the_error_says_what_to_do() -> None:
    with pytest.raises(MoveError, match=r"x=2.*2 devices.*torchrun"):
        synthesize((2, 3), Mesh({"x": 2}), "[x,-]", "[-,x]").run(torch.ones(1, 3))
