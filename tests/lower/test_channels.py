"""Channels of a pipeline without ranks: receives meet the sends of the same tensors, and nobody waits for ever, though messages
of one rank in one channel run one after the other, a message ends only where both sides have come to it, and every task waits for
all messages that its rank has under way."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count, product
from typing import Any, cast

import pytest

from scrimp import Mesh
from scrimp.lower.channels import channels_of, pairs_of, posted_in_order, tag_of, tied_tag
from scrimp.lower.stages import (
    EXPECT,
    RUN,
    SEND,
    SENT,
    TAKE,
    Crossing,
    LoweredPiece,
    Staged,
    Turn,
    crossing,
    messages,
    turns,
)
from scrimp.lower.weights.rest import rest_of
from scrimp.planner import placed, unsplit

PLACES = {
    "x=1": [unsplit((8, 4))],
    "x=2": [unsplit((8, 4)), placed([[(8, ("x",))], [(4, ())]]), placed([[(8, ())], [(4, ("x",))]])],
    "x=2,y=2": [
        unsplit((8, 4)), placed([[(8, ("x",))], [(4, ("y",))]]), placed([[(8, ("y",))], [(4, ("x",))]]),
        placed([[(8, ("x", "y"))], [(4, ())]]),
    ],
}  # fmt: skip


def staged_of(stages: int, interleave: int, rounds: int, mesh: str, tied: Sequence[tuple[int, ...]] = ()) -> Staged:
    """One to three tensors at each border, in placements that take turns. Pieces have no steps."""
    found, number, places = Mesh.parse(mesh), count(), PLACES[mesh]
    whole = (0,) * len(found.names)

    def crossings(border: int) -> tuple[Crossing, ...]:
        every = []
        for k in range(1 + border % 3):
            at = next(number)
            held, after = places[at % len(places)], places[(at // 2 + k) % len(places)]
            every.append(crossing(f"{border}:{k}", ("float32", "bfloat16")[at % 2], (), held, after, found))
        return tuple(every)

    pieces = stages * interleave
    ahead = [(), *(crossings(k) for k in range(1, pieces)), ()]
    behind = [(), *(crossings(k) for k in range(1, pieces)), ()]
    rest = [
        {
            f"tied{k}": rest_of(f"tied{k}", (8, 4), "float32", places[(s + k) % len(places)], whole, found, trained=True)
            for k, where in enumerate(tied)
            if s in where
        }
        for s in range(stages)
    ]
    return Staged(
        mesh=found,
        stages=stages,
        micro_batches=stages * rounds,
        pieces=tuple(
            LoweredPiece(
                lowered=cast(Any, None), takes=ahead[k], gives=ahead[k + 1], back_takes=behind[k + 1], back_gives=behind[k]
            )
            for k in range(pieces)
        ),
        rest=tuple(rest),
        tied=tuple((f"tied{k}", where) for k, where in enumerate(tied)),
    )  # fmt: skip


@dataclass
class Post:
    """A batch of messages of a rank: to or from other ranks, each with what it is."""

    channel: int
    sends: bool
    messages: list[tuple[int, tuple[Any, ...]]]
    left: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.left = {*range(len(self.messages))}


@dataclass
class Wait:
    posts: list[Post]


@dataclass
class Barrier:
    """A task: it waits for the ranks of its stage, and for all that its own device has under way."""

    what: Turn


Event = Post | Wait | Barrier


Numbers = dict[tuple[int, int, int], int]  # the channel of a sender, a receiver and a tag


def numbers(staged: Staged) -> Numbers:
    every = enumerate(channels_of(staged))
    return {(each.sender, each.receiver, tag): k for k, each in every for tag in each.tags}


def events(staged: Staged, number: Numbers, stage: int, rank: int, order: Sequence[Turn]) -> list[Event]:
    """What a rank of a stage does in a step, as `Pipeline` does it."""
    size, found = staged.mesh.size, list[Event]()
    expected: dict[tuple[int, bool], list[Post]] = {}
    sent: dict[tuple[int, bool], list[Post]] = {}

    def post(crossed: Crossing, other: int, tag: int, what: Any, *, sends: bool) -> Post:
        channel = number[(stage, other, tag) if sends else (other, stage, tag)]
        every = messages(crossed.before, crossed.after, staged.mesh)
        mine = [
            (other * size + (each.receiver if sends else each.sender), (crossed.name, crossed.dtype, what, each))
            for each in every
            if rank == (each.sender if sends else each.receiver)
        ]
        found.append(made := Post(channel, sends, mine))
        return made

    for turn in order:
        task, where = turn.task, (turn.task.piece, turn.task.backward)
        piece, tag = staged.pieces[task.piece], tag_of(task.piece, backward=task.backward)
        takes = piece.back_takes if task.backward else piece.takes
        if turn.kind == EXPECT:
            assert where not in expected, f"stage {stage}: {turn} while the buffer is in use"
            other = (task.piece + (1 if task.backward else -1)) % staged.stages
            expected[where] = [post(each, other, tag, task.micro, sends=False) for each in takes]
        elif turn.kind == TAKE:
            found.append(Wait(expected.pop(where)))
        elif turn.kind == RUN:
            found.append(Barrier(turn))
        elif turn.kind == SEND:
            sent[where] = [post(each, task.piece % staged.stages, tag, task.micro, sends=True) for each in takes]
        else:
            assert turn.kind == SENT
            found.append(Wait(sent.pop(where)))
    for k, (name, stages) in enumerate(staged.tied):
        if stage in stages:
            tag, use = tied_tag(len(staged.pieces), k), {s: staged.rest[s][name].use for s in stages}
            ways = {(a, b): crossing(name, "float32", (), use[a], use[b], staged.mesh) for a, b in product(stages, stages)}
            others = [s for s in stages if s != stage]
            arriving = [post(ways[s, stage], s, tag, "tied", sends=False) for s in others]
            leaving = [post(ways[stage, s], s, tag, "tied", sends=True) for s in others]
            found += [Wait(arriving), Wait(leaving)]
    return found


Order = Callable[[Sequence[Turn], int], Sequence[Turn]]


def simulate(staged: Staged, number: Numbers, order: Order = posted_in_order) -> int:
    """Runs all ranks. Raises if a receive meets another tensor, if all ranks wait, if anything is left, or if a rank both sends
    and receives in a channel. Returns the number of messages."""
    size, interleave = staged.mesh.size, len(staged.pieces) // staged.stages
    ranks = [
        deque(events(staged, number, s, r, order(turns(s, staged.stages, staged.micro_batches, interleave), interleave)))
        for s in range(staged.stages)
        for r in range(size)
    ]
    streams: dict[tuple[int, int], deque[Post]] = defaultdict(deque)  # of a channel and a rank
    under_way: list[list[Post]] = [[] for _ in ranks]
    ways: dict[tuple[int, int], set[bool]] = defaultdict(set)
    met = 0

    def ready(rank: int) -> bool:
        event = ranks[rank][0]
        if isinstance(event, Post):
            return True
        if isinstance(event, Wait):
            return not any(each.left for each in event.posts)
        if any(each.left for each in under_way[rank]):
            return False
        stage = range(rank // size * size, rank // size * size + size)
        return all(ranks[other] and ranks[other][0] == event for other in stage) or event.what in passed[rank // size]

    def transfer(one: tuple[int, int]) -> int:
        """The messages of the first batch of a stream whose other side has come to them too."""
        channel, rank = one
        mine = streams[one][0]
        for k in sorted(mine.left):
            other, what = mine.messages[k]
            theirs = streams.get((channel, other))
            if not theirs or theirs[0].sends == mine.sends:
                continue
            partners = [j for j in sorted(theirs[0].left) if theirs[0].messages[j][0] == rank]
            if not partners:
                continue
            met_with = theirs[0].messages[partners[0]][1]
            assert met_with == what, f"{rank} and {other}: {what} meets {met_with}"
            mine.left.remove(k)
            theirs[0].left.remove(partners[0])
            return 1
        return 0

    passed: list[list[Turn]] = [[] for _ in range(staged.stages)]
    while any(ranks):
        moved = False
        for rank, left in enumerate(ranks):
            while left and ready(rank):
                event, moved = left.popleft(), True
                if isinstance(event, Post) and event.messages:
                    ways[event.channel, rank].add(event.sends)
                    streams[event.channel, rank].append(event)
                    under_way[rank].append(event)
                elif isinstance(event, Barrier) and event.what not in passed[rank // size]:
                    passed[rank // size].append(event.what)
                under_way[rank] = [each for each in under_way[rank] if each.left]
        for one in [*streams]:
            while streams[one]:
                if not streams[one][0].left:
                    streams[one].popleft()
                elif transfer(one):
                    met, moved = met + 1, True
                else:
                    break
        assert moved, f"all ranks wait: {[left[0] for left in ranks if left]}"
    assert not any(each.left for posts in under_way for each in posts)
    assert all(len(each) == 1 for each in ways.values())
    return met


CASES = [
    *((s, v, rounds, "x=1") for s, v, rounds in product((2, 3, 4, 8), (1, 2, 3), (1, 2, 3))),
    *((s, v, 2, mesh) for s, v, mesh in product((2, 3), (1, 2), ("x=2", "x=2,y=2"))),
]


@pytest.mark.parametrize(("stages", "interleave", "rounds", "mesh"), CASES)
def test_receives_meet_their_sends_and_nobody_waits_for_ever(stages: int, interleave: int, rounds: int, mesh: str) -> None:
    tied = [(0, stages - 1), tuple(range(stages))]
    staged = staged_of(stages, interleave, rounds, mesh, tied)
    found = simulate(staged, numbers(staged))
    every = [each for piece in staged.pieces for each in (*piece.takes, *piece.back_takes)]
    wanted = sum(len(messages(each.before, each.after, staged.mesh)) for each in every) * staged.micro_batches
    assert found >= wanted > 0


@pytest.mark.parametrize(("stages", "interleave", "most", "every"), [
    (2, 1, 2, 2), (2, 3, 4, 4), (4, 1, 4, 6), (4, 3, 4, 8), (8, 1, 4, 14), (8, 3, 4, 16),
])  # fmt: skip
def test_a_rank_is_in_four_channels_at_most(stages: int, interleave: int, most: int, every: int) -> None:
    found = channels_of(staged_of(stages, interleave, 1, "x=2"))
    assert len(found) == every
    assert max(sum(stage in (each.sender, each.receiver) for each in found) for stage in range(stages)) == most
    assert len({(each.sender, each.receiver, tag) for each in found for tag in each.tags}) == 2 * (stages * interleave - 1)


def test_weights_on_several_stages_use_the_channels_of_borders() -> None:
    alone, tied = (channels_of(staged_of(4, 1, 1, "x=2", where)) for where in ((), [(0, 1), (0, 3), (0, 1)]))
    borders = {(each.sender, each.receiver) for each in alone}
    assert {(each.sender, each.receiver) for each in tied} == borders | {(0, 3), (3, 0)}
    assert len(tied) == len(alone) + 2
    tags = {(each.sender, each.receiver): each.tags for each in tied}
    assert tags[0, 1] == (tag_of(1, backward=False), tied_tag(4, 0), tied_tag(4, 2))
    assert tags[1, 0] == (tag_of(0, backward=True), tied_tag(4, 0), tied_tag(4, 2))
    assert tags[0, 3] == tags[3, 0] == (tied_tag(4, 1),)


@pytest.mark.parametrize("mesh", PLACES)
def test_every_rank_takes_part_in_the_first_messages_of_its_channels(mesh: str) -> None:
    staged = staged_of(3, 2, 1, mesh, [(0, 2)])
    everyone = {*range(staged.mesh.size)}
    for each in channels_of(staged):
        assert {a for a, _ in each.pairs} == {b for _, b in each.pairs} == everyone
    for k, piece in enumerate(staged.pieces):
        for backward, takes in ((False, piece.takes), (True, piece.back_takes)):
            used = {pair for crossed in takes for pair in pairs_of(crossed, staged.mesh)}
            tag, to = tag_of(k, backward=backward), k % staged.stages
            assert all(used <= {*each.pairs} for each in channels_of(staged) if each.receiver == to and tag in each.tags)


# What the simulation finds.


def test_one_channel_for_both_ways_is_found() -> None:
    staged = staged_of(2, 1, 2, "x=1")
    with pytest.raises(AssertionError, match="all ranks wait"):
        simulate(staged, dict.fromkeys(numbers(staged), 0))


@pytest.mark.parametrize(("interleave", "said"), [(1, "all ranks wait"), (2, "meets|all ranks wait")])
def test_receives_that_are_posted_ahead_are_found(interleave: int, said: str) -> None:
    """They wait for what the same rank sends later; with several pieces a stage they also meet other tensors."""
    staged = staged_of(2, interleave, 2, "x=1")
    with pytest.raises(AssertionError, match=said):
        simulate(staged, numbers(staged), lambda order, _: order)


def test_receives_that_are_posted_too_late_are_found() -> None:
    """With several pieces a stage all stages send gradients at once, and none may receive them before its next forward."""
    staged = staged_of(2, 2, 2, "x=1")
    with pytest.raises(AssertionError, match="all ranks wait"):
        simulate(staged, numbers(staged), lambda order, _: posted_in_order(order, 1))


def test_turns_without_channels_are_the_same_but_for_receives() -> None:
    for stage, interleave in product(range(4), (1, 2)):
        order = turns(stage, 4, 8, interleave)
        found = posted_in_order(order, interleave)
        assert [turn for turn in found if turn.kind != EXPECT] == [turn for turn in order if turn.kind != EXPECT]
        for backward in (False, True):
            expected, taken = (
                [turn.task for turn in found if turn.kind == kind and turn.task.backward == backward] for kind in (EXPECT, TAKE)
            )
            assert expected == taken
