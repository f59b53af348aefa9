"""Schedules of stages: against closed forms, against a clock of another make, and without a task too many or too few."""

from __future__ import annotations

import random
from itertools import pairwise, product

import pytest

from scrimp.planner.pipeline.schedule import Task, Work, scenes, simulate, tasks

SHAPES = [
    (1, 1, 1),
    (1, 5, 1),
    (2, 1, 1),
    (2, 6, 1),
    (4, 3, 1),
    (4, 8, 1),
    (8, 16, 1),
    (2, 4, 2),
    (4, 8, 2),
    (4, 4, 3),
    (3, 9, 4),
]


@pytest.mark.parametrize(("stages", "micro_batches", "interleave"), SHAPES)
def test_every_task_is_there_once(stages: int, micro_batches: int, interleave: int) -> None:
    for stage in range(stages):
        order = tasks(stage, stages, micro_batches, interleave)
        pieces = [chunk * stages + stage for chunk in range(interleave)]
        every = product(pieces, range(micro_batches), (False, True))
        assert sorted((task.piece, task.micro, task.backward) for task in order) == sorted(every)
        for task in order:
            if task.backward:
                assert order.index(Task(piece=task.piece, micro=task.micro, backward=False)) < order.index(task)


@pytest.mark.parametrize(("stages", "micro_batches", "interleave"), SHAPES)
def test_so_many_are_in_flight(stages: int, micro_batches: int, interleave: int) -> None:
    for stage in range(stages):
        found = scenes(tasks(stage, stages, micro_batches, interleave), stages)
        most = max(sum(scene.flights) for scene in found)
        if interleave == 1:
            assert {scene.flights for scene in found} == {(min(micro_batches, stages - stage),)}
        else:
            warm_up = 2 * (stages - stage - 1) + (interleave - 1) * stages
            assert most == min(warm_up + 1, micro_batches * interleave)
        assert {(scene.piece, scene.backward) for scene in found} == {*product(range(interleave), (False, True))}
        assert all(scene.flights[scene.piece] > 0 for scene in found)


@pytest.mark.parametrize(("stages", "micro_batches", "interleave"), SHAPES)
def test_stages_that_are_alike_take_what_the_formula_says(stages: int, micro_batches: int, interleave: int) -> None:
    if micro_batches < stages:
        return
    forward, backward = 3.0, 5.0
    works = [Work(forward=forward / interleave, backward=backward / interleave) for _ in range(stages * interleave)]
    found = simulate(works, stages, micro_batches)
    ideal = micro_batches * (forward + backward)
    assert found.seconds == pytest.approx(ideal + (stages - 1) * (forward + backward) / interleave)
    assert found.bubble == pytest.approx(1 - ideal / found.seconds)
    assert found.seconds / ideal - 1 == pytest.approx((stages - 1) / (interleave * micro_batches))


def relaxed(works: list[Work], stages: int, micro_batches: int) -> float:
    """The same by inequalities between starts, raised until all hold: no order of events is followed."""
    interleave, last = len(works) // stages, len(works) - 1
    start: dict[tuple[int, int, bool], float] = {}
    rules: list[tuple[tuple[int, int, bool], tuple[int, int, bool], float]] = []  # the second so much later than the first

    def takes(piece: int, backward: bool) -> float:
        return works[piece].backward if backward else works[piece].forward

    def travels(piece: int, backward: bool) -> float:
        return works[piece].gradient_transfer if backward else works[piece].input_transfer

    for stage in range(stages):
        order = [(task.piece, task.micro, task.backward) for task in tasks(stage, stages, micro_batches, interleave)]
        start |= dict.fromkeys(order, 0.0)
        rules += [(one, two, takes(one[0], one[2])) for one, two in pairwise(order)]
    for piece, micro, backward in start:
        step = -1 if backward else 1
        to = piece + step
        if 0 <= to <= last:
            lands = takes(piece, backward) + travels(to, backward)
            rules.append(((piece, micro, backward), (to, micro, backward), lands))
            if micro:  # the landing place is free when the one before was taken
                rules.append(((to, micro - 1, backward), (to, micro, backward), travels(to, backward)))
            if micro + 1 < micro_batches:  # what was sent has landed
                rules.append(((piece, micro, backward), (piece, micro + 1, backward), lands))
                if micro:
                    rules.append(((to, micro - 1, backward), (piece, micro + 1, backward), travels(to, backward)))
        if not backward:
            rules.append(((piece, micro, False), (piece, micro, True), takes(piece, False)))
    for _ in range(len(start) + 1):
        before = dict(start)
        for one, two, seconds in rules:
            start[two] = max(start[two], start[one] + seconds)
        if start == before:
            return max(at + takes(piece, backward) for (piece, _, backward), at in start.items())
    raise AssertionError("they wait for each other")


@pytest.mark.parametrize(("stages", "micro_batches", "interleave"), SHAPES)
def test_a_clock_of_another_make_says_the_same(stages: int, micro_batches: int, interleave: int) -> None:
    rng = random.Random(stages * 100 + micro_batches)
    for _ in range(5):
        works = [
            Work(
                forward=rng.uniform(0.1, 2),
                backward=rng.uniform(0.1, 4),
                input_transfer=rng.choice([0.0, rng.uniform(0, 3)]),
                gradient_transfer=rng.choice([0.0, rng.uniform(0, 3)]),
            )
            for _ in range(stages * interleave)
        ]
        found = simulate(works, stages, micro_batches)
        assert found.seconds == pytest.approx(relaxed(works, stages, micro_batches))
        busy = [sum(works[k].forward + works[k].backward for k in range(s, len(works), stages)) for s in range(stages)]
        assert found.seconds >= micro_batches * max(busy) - 1e-9
        assert found.bubble == pytest.approx(1 - micro_batches * sum(busy) / (stages * found.seconds))


def test_no_schedule_waits_for_itself() -> None:
    for stages, rounds, interleave in product(range(1, 7), range(1, 4), range(1, 5)):
        counts = [stages * rounds] if interleave > 1 else [rounds, stages * rounds + 1]
        if stages == 1 and interleave > 1:
            continue
        works = [Work(forward=1.0, backward=2.0, input_transfer=0.5, gradient_transfer=0.5)] * (stages * interleave)
        for count in counts:
            assert simulate(works, stages, count).seconds > 0
