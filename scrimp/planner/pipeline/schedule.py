"""Who runs which micro-batch when: one forward, one backward; interleaved where a device has several pieces of the model.

A model is cut into pieces; stage s of S (some devices) has the pieces s, S + s, 2 S + s and so on, `interleave` of them. It first
runs some forwards ("warm-up"), then a forward and a backward by turns, then the backwards that are left. With one piece each the
warm-up is S - s - 1 micro-batches; with v it is 2 (S - s - 1) + (v - 1) S of a piece each, in rounds of S micro-batches a piece.

Between pieces there is one buffer to land in, each way, and one to send from:

    a task starts      after the one before it on its device, after its input has landed, and after what the same piece sent last
                       in that direction has landed
    a transfer starts  after the task that makes it, and after the one before it was taken from the buffer it lands in

With that, memory is known without the clock, and the clock is a longest path: `simulate`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Task:
    """The forward or the backward of a micro-batch through a piece."""

    piece: int
    micro: int
    backward: bool


@dataclass(frozen=True, kw_only=True)
class Scene:
    """A piece of a device runs forward, or backward, while of each of the device's pieces so many micro-batches are in flight,
    that which runs among them. Pieces are counted on the device, from 0."""

    piece: int
    backward: bool
    flights: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Work:
    """Seconds of a piece for a micro-batch, and of what comes to it: the input from the piece before it, the gradient from the
    piece behind it."""

    forward: float
    backward: float
    input_transfer: float = 0.0
    gradient_transfer: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Timing:
    """`seconds`: until the last backward is done; `ends`: of every stage; `bubble`: the share of it in which a device waits, on
    average."""

    seconds: float
    ends: tuple[float, ...]
    bubble: float


def tasks(stage: int, stages: int, micro_batches: int, interleave: int = 1) -> tuple[Task, ...]:
    """All tasks of a stage, in order."""
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
    """What can be in flight while a piece runs; without what another scene has as well, and more."""
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
    """`pieces` in the order of the model; their number is a multiple of the stages."""
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
        assert moved, "a schedule in which all wait for each other"
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
        """When it can start at the earliest; None while that is not known."""
        times = [*self._conditions(task)]
        return None if None in times else max(time for time in times if time is not None)

    def _conditions(self, task: Task) -> Iterator[float | None]:
        yield 0.0
        if task.backward:
            yield self.ended.get(Task(piece=task.piece, micro=task.micro, backward=False))
        yield self._landed(task)
        behind = task.piece + (-1 if task.backward else 1)
        if task.micro and 0 <= behind < len(self.pieces):
            yield self._landed(Task(piece=behind, micro=task.micro - 1, backward=task.backward))

    def _landed(self, task: Task) -> float | None:
        """When a task's input is there."""
        ahead = task.piece + (1 if task.backward else -1)
        if not 0 <= ahead < len(self.pieces):
            return 0.0
        made = self.ended.get(Task(piece=ahead, micro=task.micro, backward=task.backward))
        taken = self.started.get(Task(piece=task.piece, micro=task.micro - 1, backward=task.backward)) if task.micro else 0.0
        if made is None or taken is None:
            return None
        work = self.pieces[task.piece]
        return max(made, taken) + (work.gradient_transfer if task.backward else work.input_transfer)
