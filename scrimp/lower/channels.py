"""The channels of a pipeline: over which process group each tensor between stages travels, where the backend has no tags.

One channel goes from a stage to the next one with activations, another one back with gradients; with several pieces a stage also
from the last stage to the first one, and back. All pieces of a stage share its channels. They need no tags: a stage takes tensors
of one direction in the order in which the other stage sends them, because all stages run forwards in one order of micro-batches
and pieces, and backwards in one order too.

A rank may wait for its whole device within any task: CUDA does so when it loads a kernel or frees memory. A receive that is under
way then must not need a message that this rank sends later. So a receive is not posted as soon as its buffer is free, as over
gloo, but where its tensor is taken, or one task earlier (`posted_in_order`).

Nothing here needs torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from scrimp.layout import Mesh
from scrimp.lower.stages import EXPECT, RUN, TAKE, Crossing, Staged, Turn, crossing, messages
from scrimp.move import Channel

Pairs = set[tuple[int, int]]


def tag_of(piece: int, *, backward: bool) -> int:
    """Of the tensors that a task of a piece takes."""
    return 2 * piece + backward


def tied_tag(pieces: int, number: int) -> int:
    """Of the gradients of a weight on several stages."""
    return 2 * pieces + number


def channels_of(staged: Staged) -> tuple[Channel, ...]:
    """All channels of a plan, in one order. Gradients of a weight on several stages travel at the end of a step, when the other
    channels between two stages are free; two stages that share no border get channels for them."""
    size, found = staged.mesh.size, dict[tuple[int, int, bool], tuple[set[int], Pairs]]()

    def add(sender: int, receiver: int, backward: bool, tag: int, crossed: Crossing) -> None:
        tags, pairs = found.setdefault((sender, receiver, backward), (set(), set()))
        tags.add(tag)
        pairs.update(pairs_of(crossed, staged.mesh))

    for piece, (sender, receiver, backward, each) in _borders(staged):
        add(sender, receiver, backward, tag_of(piece, backward=backward), each)
    for number, (name, stages) in enumerate(staged.tied):
        for sender, receiver in ((a, b) for a in stages for b in stages if a != b):
            there, here = staged.rest[sender][name], staged.rest[receiver][name]
            crossed = crossing(name, here.dtype, (), there.use, here.use, staged.mesh)
            backward = (sender, receiver, False) not in found and (sender, receiver, True) in found
            add(sender, receiver, backward, tied_tag(len(staged.pieces), number), crossed)
    return tuple(
        Channel(sender=sender, receiver=receiver, tags=tuple(sorted(tags)), pairs=_complete(pairs, size))
        for (sender, receiver, _), (tags, pairs) in sorted(found.items())
    )


def posted_in_order(turns: Sequence[Turn], interleave: int) -> tuple[Turn, ...]:
    """The same turns, with each tensor expected just before it is taken. With several pieces a stage, where forwards and
    backwards alternate, all stages may have sent tensors of one way, and each runs a task of the other way next: there a tensor
    is expected before that task."""
    found: list[Turn] = []
    ran: list[int] = []  # where the tasks are
    for turn in turns:
        if turn.kind == EXPECT:
            continue
        if turn.kind == TAKE:
            backward, expected = turn.task.backward, Turn(kind=EXPECT, task=turn.task)
            if interleave > 1 and [found[at].task.backward for at in ran[-2:]] == [backward, not backward]:
                found.insert(ran[-1], expected)
                ran[-1] += 1
            else:
                found.append(expected)
        elif turn.kind == RUN:
            ran.append(len(found))
        found.append(turn)
    return tuple(found)


def pairs_of(crossed: Crossing, mesh: Mesh) -> frozenset[tuple[int, int]]:
    """Which rank of the one stage sends to which rank of the other."""
    found = messages(crossed.before.permuted(crossed.order), crossed.after.permuted(crossed.order), mesh)
    return frozenset((each.sender, each.receiver) for each in found)


def _borders(staged: Staged) -> Iterator[tuple[int, tuple[int, int, bool, Crossing]]]:
    """Each tensor that crosses a border, with the piece that takes it."""
    for k, piece in enumerate(staged.pieces):
        for backward, takes in ((False, piece.takes), (True, piece.back_takes)):
            other = (k + 1 if backward else k - 1) % staged.stages
            for each in takes:
                yield k, (other, k % staged.stages, backward, each)


def _complete(pairs: Pairs, size: int) -> tuple[tuple[int, int], ...]:
    """With a pair for each rank that has none: all ranks of a group must take part in its first messages."""
    senders, receivers = {a for a, _ in pairs}, {b for _, b in pairs}
    idle = {(rank, rank) for rank in range(size) if rank not in senders or rank not in receivers}
    return tuple(sorted(pairs | idle))
