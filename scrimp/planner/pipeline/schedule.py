"""The 1F1B pipeline schedule; interleaved where a device has several model chunks (pieces).

The model is cut into pieces; stage s of S (a set of devices) has the pieces s, S + s, 2 S + s and so on, `interleave` of them. It
first runs some forwards ("warm-up"), then alternates one forward and one backward, then runs the remaining backwards. With one
piece per stage the warm-up is S - s - 1 micro-batches; with v pieces it is 2 (S - s - 1) + (v - 1) S forwards of one piece, in
rounds of S micro-batches a piece.

Between pieces there is one receive buffer and one send buffer per direction:

    a task starts      after the task before it on its device, after its input has arrived, and after the last tensor that the
                       same piece sent in that direction has arrived
    a transfer starts  after the task that makes it, and after the tensor before it left the receive buffer

So memory does not depend on the clock, and the step time is a longest path: `simulate`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Task:
    """The forward or the backward of one micro-batch through one piece."""

    piece: int
    micro: int
    backward: bool


@dataclass(frozen=True, kw_only=True)
class Scene:
    """A memory state of a device: one of its pieces runs forward or backward, while `flights` micro-batches of each of its pieces
    are in flight, the running one included. Pieces are numbered on the device, from 0."""

    piece: int
    backward: bool
    flights: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Work:
    """Seconds of a piece for one micro-batch, and of its transfers: the input from the piece before it, the gradient from the
    piece after it."""

    forward: float
    backward: float
    input_transfer: float = 0.0
    gradient_transfer: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Timing:
    """`seconds`: until the last backward ends; `ends`: of every stage; `bubble`: mean share of it in which a device is idle."""

    seconds: float
    ends: tuple[float, ...]
    bubble: float


def tasks(stage: int, stages: int, micro_batches: int, interleave: int = 1) -> tuple[Task, ...]:
    """All tasks of a stage, in the order in which it runs them."""
    count = micro_batches * interleave
    warm_up = stages - stage - 1 if interleave == 1 else 2 * (stages - stage - 1) + (interleave - 1) * stages
    warm_up = min(warm_up, count)

    def task(k: int, backward: bool) -> Task:
        turn, within = divmod(k, stages * interleave)
        chunk, micro = divmod(within, stages)
        chunk = interleave - 1 - chunk if backward else chunk
        return Task(piece=chunk * stages + stage, micro=turn * stages + micro, backward=backward)

    order = [task(k, False) for k in range(warm_up)]
    for k in range(count - warm_up):
        order += [task(warm_up + k, False), task(k, True)]
    return (*order, *(task(k, True) for k in range(count - warm_up, count)))


def scenes(order: Sequence[Task], stages: int) -> tuple[Scene, ...]:
    """The memory states of a stage; a state dominated by another one is left out."""
    pieces = sorted({task.piece // stages for task in order})
    flights = [0] * len(pieces)
    found: dict[tuple[int, bool], list[tuple[int, ...]]] = {}
    for task in order:
        chunk = task.piece // stages
        flights[chunk] += not task.backward
        seen = found.setdefault((chunk, task.backward), [])
        if not any(_within(tuple(flights), other) for other in seen):
            seen[:] = [*(other for other in seen if not _within(other, tuple(flights))), tuple(flights)]
        flights[chunk] -= task.backward
    return tuple(
        Scene(piece=piece, backward=backward, flights=each) for (piece, backward), seen in sorted(found.items()) for each in seen
    )


def _within(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    return all(a <= b for a, b in zip(one, other, strict=True))


def simulate(pieces: Sequence[Work], stages: int, micro_batches: int) -> Timing:
    """Simulates the schedule. `pieces`: in model order; their number is a multiple of the stages."""
    interleave = len(pieces) // stages
    clock = _Clock(pieces)
    left = [iter(tasks(stage, stages, micro_batches, interleave)) for stage in range(stages)]
    heads = [next(each, None) for each in left]
    ends, busy = [0.0] * stages, [0.0] * stages
    while any(head is not None for head in heads):
        moved = False
        for stage in range(stages):
            while (task := heads[stage]) is not None and (ready := clock.ready(task)) is not None:
                start = max(ready, ends[stage])
                ends[stage] = clock.run(task, start)
                busy[stage] += ends[stage] - start
                heads[stage], moved = next(left[stage], None), True
        assert moved, "the schedule deadlocks"
    total = max(ends)
    return Timing(seconds=total, ends=tuple(ends), bubble=1 - sum(busy) / (stages * total) if total > 0 else 0.0)


class _Clock:
    def __init__(self, pieces: Sequence[Work]) -> None:
        self.pieces = pieces
        self.started: dict[Task, float] = {}
        self.ended: dict[Task, float] = {}

    def run(self, task: Task, start: float) -> float:
        work = self.pieces[task.piece]
        self.started[task] = start
        self.ended[task] = start + (work.backward if task.backward else work.forward)
        return self.ended[task]

    def ready(self, task: Task) -> float | None:
        """The earliest start; None while its inputs are not scheduled."""
        times = [*self._conditions(task)]
        return None if None in times else max(time for time in times if time is not None)

    def _conditions(self, task: Task) -> Iterator[float | None]:
        yield 0.0
        if task.backward:
            yield self.ended.get(Task(piece=task.piece, micro=task.micro, backward=False))
        yield self._arrival(task)
        behind = task.piece + (-1 if task.backward else 1)
        if task.micro and 0 <= behind < len(self.pieces):
            yield self._arrival(Task(piece=behind, micro=task.micro - 1, backward=task.backward))

    def _arrival(self, task: Task) -> float | None:
        """When the task's input arrives."""
        ahead = task.piece + (1 if task.backward else -1)
        if not 0 <= ahead < len(self.pieces):
            return 0.0
        made = self.ended.get(Task(piece=ahead, micro=task.micro, backward=task.backward))
        taken = self.started.get(Task(piece=task.piece, micro=task.micro - 1, backward=task.backward)) if task.micro else 0.0
        if made is None or taken is None:
            return None
        work = self.pieces[task.piece]
        return max(made, taken) + (work.gradient_transfer if task.backward else work.input_transfer)
