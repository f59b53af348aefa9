"""One training step of a rank of a pipeline: its stage's turns in order, over all micro-batches.

A tensor from another stage arrives in a buffer that stays for the whole step, and a task copies it from there; the next one may
arrive from then on. A tensor that a task sends is held until it has arrived, at the latest when the same piece runs again in that
direction. So memory does not depend on the clock. All tensors of a task are ready before the first of them is sent.

    gradients   of all micro-batches are accumulated, each with the weight 1 / micro-batches
    loss        is the mean over micro-batches, and every rank gets it
    tied        gradients of a weight on several stages are summed at the end, in the order of stages, so that all have the same
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, Protocol

import torch

from scrimp.capture import Value
from scrimp.errors import RunError
from scrimp.lower.channels import posted_in_order, tag_of, tied_tag
from scrimp.lower.moves import Communicator, local_shape, redistribute
from scrimp.lower.run import Key, Runner, Slots, Weights
from scrimp.lower.stages import (
    EXPECT,
    RUN,
    SEND,
    TAKE,
    Box,
    Crossing,
    LoweredPiece,
    Staged,
    Turn,
    crossing,
    messages,
    tile_shape,
    turns,
)
from scrimp.lower.weights.tiles import cut
from scrimp.planner import Task


class Handle(Protocol):
    def wait(self) -> Any: ...


Parts = list[tuple[int, torch.Tensor]]  # the other rank, and the part of a tensor
Sent = tuple[Parts, Handle]


class Wire(Protocol):
    """Between ranks of different stages: `scrimp.move.Peers`, `scrimp.move.ChannelPeers`, or a simulation. `ordered`: tensors
    must be received in the order in which the other stage sends them."""

    ordered: bool

    def join(self) -> None:
        """All ranks call it before the messages of a step."""
        ...

    def send(self, parts: Sequence[tuple[int, torch.Tensor]], stage: int, tag: int) -> Handle:
        """The parts of a tensor, each to a rank of a stage."""
        ...

    def receive(self, parts: Sequence[tuple[int, torch.Tensor]], stage: int, tag: int) -> Handle: ...

    def spread(self, tensor: torch.Tensor, stage: int) -> None:
        """Overwrites a tensor with that of the first rank of a stage, on every rank."""
        ...


class StageWeights(Weights, Protocol):
    """Weights of which other stages hold some too."""

    def gradient_tile(self, name: str) -> torch.Tensor:
        """An accumulated gradient in the placement of its weight in use."""
        ...

    def set_gradient(self, name: str, tile: torch.Tensor) -> None: ...


class Pipeline:
    """`runner`: what runs the steps of a piece, `Interpreter` or `Generated`. `comm`: of the ranks of this stage. `device`: where
    operators run, and where tensors of other stages arrive."""

    def __init__(
        self,
        staged: Staged,
        stage: int,
        comm: Communicator,
        weights: StageWeights,
        wire: Wire,
        runner: type[Runner],
        *,
        seed: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        self.device = torch.device(device)
        self.staged, self.stage, self.comm, self.weights, self.wire, self.seed = staged, stage, comm, weights, wire, seed
        numbers = range(stage, len(staged.pieces), staged.stages)
        self.runners = {k: runner(staged.pieces[k].lowered, comm, weights, device=device) for k in numbers}
        order = turns(stage, staged.stages, staged.micro_batches, len(self.runners))
        self.turns = posted_in_order(order, len(self.runners)) if wire.ordered else order

    def step(self, batch: Mapping[str, torch.Tensor], *, scale: float = 1.0) -> torch.Tensor:
        """Forward and backward of all micro-batches. `batch`: all rows of the step, from which this rank takes its part of a
        micro-batch when a piece needs it. The loss is that of the whole batch. `scale`: a factor of all gradients."""
        self.wire.join()
        with torch.no_grad():
            step = _Step(self, batch, scale)
            for turn in self.turns:
                step.run(turn)
            loss = step.loss
            del step
            for number, (name, stages) in enumerate(self.staged.tied):
                if self.stage in stages:
                    self._sum_tied(name, stages, tied_tag(len(self.staged.pieces), number))
            self.wire.spread(loss, (len(self.staged.pieces) - 1) % self.staged.stages)
        return loss

    def parts(self, crossed: Crossing, tensor: torch.Tensor) -> Parts:
        """What this rank sends of a tensor. A part that is not contiguous is packed."""
        order, mesh = crossed.order, self.comm.mesh
        if crossed.held != crossed.before:
            tensor = redistribute(self.comm, tensor, crossed.held, crossed.before, order, donate=False)
        before, after = crossed.before.permuted(order), crossed.after.permuted(order)
        tile = (tensor.permute(*order) if order else tensor).reshape(tile_shape(before, after, mesh))
        mine = [each for each in messages(before, after, mesh) if each.sender == self.comm.rank]
        return [(each.receiver, _part(tile, each.source).contiguous()) for each in mine]

    def _sum_tied(self, name: str, stages: tuple[int, ...], tag: int) -> None:
        """Each stage receives the gradients of the others, and adds them in the order of stages."""
        mesh, rest = self.comm.mesh, [each.get(name) for each in self.staged.rest]
        here = rest[self.stage]
        assert here is not None
        others = {s: each for s, each in enumerate(rest) if each is not None and s != self.stage}
        mine = self.weights.gradient_tile(name)
        arriving = {
            s: _Inbox(self, crossing(name, here.dtype, (), each.use, here.use, mesh), s, tag) for s, each in others.items()
        }
        leaving = {s: self.parts(crossing(name, here.dtype, (), here.use, each.use, mesh), mine) for s, each in others.items()}
        for box in arriving.values():
            box.expect()
        sent = [(parts, self.wire.send(parts, s, tag)) for s, parts in leaving.items()]
        total: torch.Tensor | None = None
        for s in stages:
            part = mine if s == self.stage else arriving[s].take()
            total = part.clone() if total is None else total.add_(part)
        _wait(sent)
        assert total is not None
        self.weights.set_gradient(name, total)


class _Inbox:
    """The buffer of one tensor from another stage: its messages one behind the other."""

    def __init__(self, run: Pipeline, crossed: Crossing, stage: int, tag: int) -> None:
        self.run, self.crossing, self.stage, self.tag = run, crossed, stage, tag
        mesh, order = run.comm.mesh, crossed.order
        self.before, self.after = crossed.before.permuted(order), crossed.after.permuted(order)
        self.tile = tile_shape(self.after, self.before, mesh)
        self.buffer = torch.empty(prod(self.tile), dtype=getattr(torch, crossed.dtype), device=run.device)
        self.parts: list[tuple[int, Box, torch.Tensor]] = []
        start = 0
        for each in messages(self.before, self.after, mesh):
            if each.receiver == run.comm.rank:
                numel = prod(stop - begin for begin, stop in each.target)
                self.parts.append((each.sender, each.target, self.buffer[start : start + numel]))
                start += numel
        self.waiting: Handle | None = None

    def expect(self) -> None:
        self.waiting = self.run.wire.receive([(rank, part) for rank, _, part in self.parts], self.stage, self.tag)

    def take(self) -> torch.Tensor:
        """A copy of what has arrived, so that the next may arrive."""
        assert self.waiting is not None
        self.waiting.wait()
        made = torch.empty(self.tile, dtype=self.buffer.dtype, device=self.buffer.device)
        for _, box, part in self.parts:
            target = _part(made, box)
            target.copy_(part.view(target.shape))
        made = made.view(local_shape(self.after, self.run.comm.mesh))
        order = self.crossing.order
        return made.permute(*sorted(range(len(order)), key=order.__getitem__)) if order else made


class _Step:
    """`taken`: what has arrived for the task that runs next; `made`: what that task sends. `saved` and `losses`: of micro-batches
    in flight."""

    def __init__(self, run: Pipeline, batch: Mapping[str, torch.Tensor], scale: float) -> None:
        self.pipeline, self.batch, self.scale = run, batch, scale
        self.loss = torch.zeros((), device=run.device)
        self.losses: dict[int, torch.Tensor] = {}
        self.saved: dict[tuple[int, int], list[Slots]] = {}
        self.taken: dict[str, torch.Tensor] = {}
        self.made: dict[str, torch.Tensor] = {}
        self.sent: dict[tuple[int, bool], list[Sent]] = {}
        self.inboxes: dict[tuple[int, bool], list[_Inbox]] = {}
        for k in run.runners:
            piece = run.staged.pieces[k]
            for backward, takes in ((False, piece.takes), (True, piece.back_takes)):
                stage = (k + (1 if backward else -1)) % run.staged.stages
                self.inboxes[k, backward] = [_Inbox(run, each, stage, tag_of(k, backward=backward)) for each in takes]

    def run(self, turn: Turn) -> None:
        task = turn.task
        where = (task.piece, task.backward)
        if turn.kind == EXPECT:
            for box in self.inboxes[where]:
                box.expect()
        elif turn.kind == TAKE:
            self.taken = {box.crossing.name: box.take() for box in self.inboxes[where]}
        elif turn.kind == RUN and task.backward:
            self._backward(task)
        elif turn.kind == RUN:
            self._forward(task)
        elif turn.kind == SEND:
            piece, stage = self.pipeline.staged.pieces[task.piece], task.piece % self.pipeline.staged.stages
            tag = tag_of(task.piece, backward=task.backward)
            takes = piece.back_takes if task.backward else piece.takes
            leaving = [self.pipeline.parts(crossed, self.made.pop(crossed.name)) for crossed in takes]
            self.sent[where] = [(parts, self.pipeline.wire.send(parts, stage, tag)) for parts in leaving]
        else:
            _wait(self.sent.pop(where))

    def _forward(self, task: Task) -> None:
        piece, runner = self._of(task)
        lowered, comm = piece.lowered, self.pipeline.comm
        given = {name: self.taken[name] for name in lowered.batch if name in self.taken}
        for value in lowered.graph.batch:
            whole = micro_rows(self.batch, value, task.micro, self.pipeline.staged.micro_batches)
            given[value.name] = self.pipeline.weights.fetch(cut(whole, lowered.batch[value.name], comm.mesh, comm.rank))
        leaving = {each.name: piece.key(each.name) for each in piece.gives}
        self.made = {name: self.taken[name] for name, key in leaving.items() if key is None}
        self.taken = {}
        saved, left = runner.forward(given, {key for key in leaving.values() if key is not None})
        self.made |= {name: left[key] for name, key in leaving.items() if key is not None}
        self.saved[task.piece, task.micro] = saved
        if lowered.loss is not None:
            loss = self.losses[task.micro] = left[lowered.loss.layer, lowered.loss.name]
            self.loss += loss / self.pipeline.staged.micro_batches

    def _backward(self, task: Task) -> None:
        piece, runner = self._of(task)
        arrived: dict[Key, torch.Tensor] = {}
        relayed: dict[str, torch.Tensor] = {}
        for name in [*self.taken]:
            key = piece.key(name)
            if key is None:
                relayed[name] = self.taken.pop(name)
            else:
                arrived[key] = self.taken.pop(name)
        if (loss := piece.lowered.loss) is not None:
            one = self.losses.pop(task.micro)
            arrived[loss.layer, loss.name] = torch.full_like(one, self.scale / self.pipeline.staged.micro_batches)
        found = runner.backward(self.saved.pop((task.piece, task.micro)), arrived)
        self.made = {}
        for each in piece.back_gives:
            mine, other = found.pop((None, each.name), None), relayed.pop(each.name, None)
            place = piece.lowered.gradients.get(each.name)
            if mine is not None and place is not None and place != each.held:
                mine = redistribute(self.pipeline.comm, mine, place, each.held, each.order, donate=False)
            sum_of = other if mine is None else mine if other is None else other.add_(mine)
            assert sum_of is not None
            self.made[each.name] = sum_of

    def _of(self, task: Task) -> tuple[LoweredPiece, Runner]:
        run = self.pipeline
        runner = run.runners[task.piece]
        runner.seed = run.seed * run.staged.micro_batches + task.micro
        return run.staged.pieces[task.piece], runner


def micro_rows(batch: Mapping[str, torch.Tensor], value: Value, micro: int, count: int) -> torch.Tensor:
    """A micro-batch's rows of a tensor. One that has no rows of the batch is given to every micro-batch."""
    tensor, shape = batch[value.name], value.shape
    if tuple(tensor.shape) == shape:
        return tensor
    if not shape or tuple(tensor.shape) != (count * shape[0], *shape[1:]):
        raise RunError(
            f"'{value.name}' of the batch is {list(tensor.shape)}; the plan has {count} micro-batches of {list(shape)}: give a "
            f"batch of {[count * shape[0], *shape[1:]] if shape else []}, or plan with this one"
        )
    return tensor[micro * shape[0] : (micro + 1) * shape[0]]


def _part(tile: torch.Tensor, box: Box) -> torch.Tensor:
    for dim, (start, stop) in enumerate(box):
        tile = tile.narrow(dim, start, stop - start)
    return tile


def _wait(sent: list[Sent]) -> None:
    for _, handle in sent:
        handle.wait()
