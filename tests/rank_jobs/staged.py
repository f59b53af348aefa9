"""Plans with pipeline stages on real ranks: one step, its oracle (torch.distributed.pipelining, with autograd, on the same pieces
of a GPT), and what an engine does besides stepping."""

from __future__ import annotations

import copy
import warnings
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import Schedule1F1B, ScheduleInterleaved1F1B

from scrimp import AdamW, Engine, Memory, Plan, RunError, zoo
from scrimp.capture import from_json
from scrimp.chunks import Wire
from scrimp.engine.lowered.weights import EngineWeights
from scrimp.errors import FitError
from scrimp.lower import Generated, Interpreter, Ranks, channels_of, lower_stages
from scrimp.move import ChannelPeers, Program
from tests.rank_jobs.planned_engine import engine_of, stepped, train
from tests.support.lowering.run import batch_of
from tests.support.lowering.staged import LAYERS, batch_for, build, fixed_nbytes, metered_stage

_groups: dict[tuple[int, int], list[dist.ProcessGroup]] = {}


def stage_groups(stages: int, size: int) -> list[dist.ProcessGroup]:
    """The group of each stage; made once, by all ranks."""
    if (stages, size) not in _groups:
        _groups[stages, size] = [dist.new_group([*range(s * size, (s + 1) * size)]) for s in range(stages)]
    return _groups[stages, size]


def step(
    plan: str, graph: str, family: str, dim: int, rows: int, generated: bool = False, channels: bool = False
) -> tuple[float, dict[str, torch.Tensor], int, str]:
    model = build(family, dim)  # first: a graph may have operators that the model's module registers
    found, captured = Plan.from_json(plan), from_json(graph)
    staged = lower_stages(found, captured)
    staged.check()
    stage, rank = divmod(dist.get_rank(), staged.mesh.size)
    comm = Ranks(staged.mesh, rank, stage_groups(staged.stages, staged.mesh.size)[stage])
    batch = batch_of(captured, batch_for(family, rows, dim))
    runner = Generated if generated else Interpreter
    return metered_stage(staged, stage, comm, model, batch, found.optimizer, runner, channels=channels)


class Counted(Ranks):
    """Counts the moves in which tensors travel."""

    moves = 0

    def move(self, program: Program, local: Tensor, *, donate: bool) -> Tensor:
        self.moves += bool(program.steps)
        return super().move(program, local, donate=donate)


def bucketed(plan: str, graph: str, family: str, dim: int, rows: int) -> list[tuple[dict[str, Tensor], int, int, int]]:
    """A step without and with buckets: gradients, moves, the peak of live storages, and what is at rest."""
    model = build(family, dim)
    found, captured = Plan.from_json(plan), from_json(graph)
    staged = lower_stages(found, captured)
    stage, rank = divmod(dist.get_rank(), staged.mesh.size)
    results = []
    for together in (False, True):
        comm = Counted(staged.mesh, rank, stage_groups(staged.stages, staged.mesh.size)[stage])
        batch = batch_of(captured, batch_for(family, rows, dim))
        _, gradients, peak, _ = metered_stage(staged, stage, comm, model, batch, found.optimizer, together=together)
        results.append((gradients, comm.moves, peak, fixed_nbytes(staged, stage, found.optimizer)))
    return results


class Chunk(nn.Module):
    """The layers from `first` to `stop` - 1: the embeddings are layer 0, then the blocks, then norm and head."""

    def __init__(self, model: Any, first: int, stop: int) -> None:
        super().__init__()
        model = copy.deepcopy(model)
        self.embed, self.positions = (model.embed, model.positions) if first == 0 else (None, None)
        self.blocks = nn.ModuleDict({str(k - 1): model.blocks[k - 1] for k in range(max(first, 1), min(stop, LAYERS + 1))})
        self.norm, self.head = (model.norm, model.head) if stop == LAYERS + 2 else (None, None)

    def forward(self, x: Tensor) -> Tensor:
        if self.embed is not None:
            assert self.positions is not None
            x = self.embed(x) + self.positions(torch.arange(x.shape[1]))
        for block in self.blocks.values():
            x = block(x)
        if self.norm is not None:
            assert self.head is not None
            x = self.head(self.norm(x))
        return x


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def gradients(cuts: list[list[tuple[int, int]]], rows: int, micro_batches: int) -> tuple[float, dict[str, Tensor]]:
    """`cuts`: the pieces of each stage. The mean loss, on the last rank, and the gradients of this rank's pieces."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model, (tokens, targets) = build("gpt"), batch_for("gpt", rows)
    chunks = [Chunk(model, *span) for span in cuts[rank]]
    pieces = world * len(chunks)
    stages = [PipelineStage(each, rank + world * k, pieces, torch.device("cpu")) for k, each in enumerate(chunks)]
    losses: list[Tensor] = []
    given, wanted = [tokens] if rank == 0 else [], {"target": targets, "losses": losses} if rank == world - 1 else {}
    if len(stages) == 1:
        Schedule1F1B(stages[0], micro_batches, loss_of).step(*given, **wanted)
    else:
        ScheduleInterleaved1F1B(stages, micro_batches, loss_of).step(*given, **wanted)
    found: dict[str, Tensor] = {}
    for chunk in chunks:
        for name, each in chunk.named_parameters():
            assert each.grad is not None
            found[name] = each.grad
    return float(sum(losses)) / micro_batches, found


# The engine.


def holds(plan: str, name: str, settings: dict[str, Any], rows: int) -> dict[str, int]:
    """The elements of each weight that this rank holds after a step."""
    engine = engine_of(plan, name, settings)
    stepped(engine, name, settings, rows, 0)
    return {slot.name: slot.numel for layer in engine._run.store.table.layers for slot in layer.slots}


def tied(
    plan: str, name: str, settings: dict[str, Any], rows: int, steps: int, weight: str, **options: Any
) -> torch.Tensor | None:
    """A weight after some steps, by the ranks of this stage alone; None if the stage does not hold it."""
    engine = engine_of(plan, name, settings, **options)
    for step in range(steps):
        stepped(engine, name, settings, rows, step)
    passes = engine._run.under_plan
    if weight not in passes.program.part.rest:
        return None
    with torch.no_grad():
        return EngineWeights.whole(passes.weights, weight).clone().cpu()


def reads(plan: str, name: str, settings: dict[str, Any], rows: int, edited: str) -> dict[str, Any]:
    """What every rank reads: outputs of the model at another batch size before and after a step, what is on the device before and
    after, the state, and a parameter that was doubled in place."""
    engine = engine_of(plan, name, settings)
    tokens, now = zoo.example_batch(name, 3, **settings)[0], [dict(engine.ledger.now)]
    outputs = [engine.evaluate(tokens).clone()]
    stepped(engine, name, settings, rows, 0)
    outputs.append(engine.evaluate(tokens).clone())
    now.append(dict(engine.ledger.now))
    before = dict(engine.iter_state())
    with engine.full_parameters(edited) as model:
        model.get_parameter(edited).data.mul_(2)
    after = dict(engine.iter_state())
    return {"outputs": outputs, "now": now, "before": before, "after": after, "saved": {*engine.state_dict()}}


def poisoned(plan: str, name: str, settings: dict[str, Any], rows: int, rank: int) -> tuple[int, str, float, float | None]:
    """A step where one rank's weight is not a number: skipped steps, the warning; the loss and the norm after it is mended."""
    engine = engine_of(plan, name, settings)
    store = engine._run.store
    layer, slot = next((k, s) for k, each in enumerate(store.table.layers) for s in each.slots if s.trainable and s.numel)
    good = store.placements[layer].weights[slot.start].clone()
    if dist.get_rank() == rank:
        store.placements[layer].weights[slot.start] = float("nan")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        stepped(engine, name, settings, rows, 0)
    if dist.get_rank() == rank:
        store.placements[layer].weights[slot.start] = good
    loss = stepped(engine, name, settings, rows, 0)
    return engine.optimizer.skipped, str(caught[0].message) if caught else "", loss, engine.optimizer.norm


def tiered(
    plan: str, name: str, settings: dict[str, Any], rows: int, steps: int, share: float, disk: str | None
) -> tuple[list[float], list[str], int]:
    """Steps with a budget of a share of this stage's peak: the losses, the tiers of layers with weights here, and the peak."""
    found = Plan.from_json(plan)
    assert found.schedule is not None
    nbytes = int(share * min(stage.memory.peak_nbytes for stage in found.schedule.stages))
    engine = engine_of(plan, name, settings, memory=Memory(device=nbytes, disk=disk))
    losses = [stepped(engine, name, settings, rows, step) for step in range(steps)]
    store = engine._run.store
    tiers = [str(placement.tier) for k, placement in enumerate(store.placements) if store.table.layers[k].numel]
    return losses, tiers, engine.ledger.peak_nbytes


def by_hand(plan: str, name: str, settings: dict[str, Any], rows: int) -> tuple[str, str, str, dict[str, Any]]:
    """What the engine says to `backward`, to `update` and to a batch of another shape; and the part of the batch."""
    engine, batch = engine_of(plan, name, settings), zoo.example_batch(name, rows, **settings)
    parts = {key: (part.of, part.shape, part.index) for key, part in engine.batch_part.items()}
    return _said(engine.backward, *batch), _said(engine.update), _said(engine.step, *(each[:2] for each in batch)), parts


class Residual(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(dim, dim), nn.BatchNorm1d(dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.linear(x)).relu()


class Odd(nn.Module):
    """A model with running statistics, frozen parameters in its first layers, and one that no operator uses."""

    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, dim), nn.Linear(dim, 1)
        self.blocks = nn.ModuleList(Residual(dim) for _ in range(4))
        self.unused = nn.Parameter(torch.ones(3))
        for parameter in (*self.first.parameters(), *self.blocks[:2].parameters()):
            parameter.requires_grad_(False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return (self.last(x) - y).square().mean()


def odd() -> Odd:
    torch.manual_seed(0)
    return Odd()


def odd_batch(step: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(step)
    return torch.randn(8, 8, generator=random), torch.randn(8, 1, generator=random)


def trained(engine: Engine, steps: int) -> tuple[list[float], float, dict[str, Tensor]]:
    """Losses of steps, the loss of an evaluation with the running statistics, and the state."""
    losses = [float(engine.step(*odd_batch(step))) for step in range(steps)]
    return losses, float(engine.evaluate(*odd_batch(steps))), dict(engine.iter_state())


def train_odd(plan: str, steps: int) -> tuple[list[float], float, dict[str, Tensor]]:
    return trained(Engine(odd(), plan=Plan.from_json(plan), optimizer=AdamW(lr=1e-3), precision="fp32", device="cpu"), steps)


def trained_over_channels(plan: str, name: str, settings: dict[str, Any], rows: int, steps: int) -> Any:
    """Steps on gloo with the messages of NCCL ranks, without tags."""

    def peers_of(program: Any, wire: Wire) -> ChannelPeers:
        return ChannelPeers(program.plan.mesh.size, channels_of(program.staged), wire.device)

    with mock.patch("scrimp.engine.lowered.rank.peers_of", peers_of):
        return train(plan, name, settings, rows, steps)


def refused(plan: str, name: str, settings: dict[str, Any], **options: Any) -> str:
    return _said(engine_of, plan, name, settings, **options)


def _said(call: Any, *args: Any, **kwargs: Any) -> str:
    try:
        made = call(*args, **kwargs)
    except (RunError, FitError) as error:
        return f"{type(error).__name__}: {error}"
    if isinstance(made, Engine):
        made.close()
    return ""
