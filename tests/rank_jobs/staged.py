"""One step of a plan with pipeline stages on real ranks, and its oracle: torch.distributed.pipelining, with autograd, on the same
pieces of a GPT."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import Schedule1F1B, ScheduleInterleaved1F1B

from scrimp import Plan
from scrimp.capture import from_json
from scrimp.lower import Generated, Interpreter, Ranks, lower_stages
from tests.support.lowering.run import batch_of
from tests.support.lowering.staged import LAYERS, batch_for, build, metered_stage

_groups: dict[tuple[int, int], list[dist.ProcessGroup]] = {}


def stage_groups(stages: int, size: int) -> list[dist.ProcessGroup]:
    """The group of each stage; made once, by all ranks."""
    if (stages, size) not in _groups:
        _groups[stages, size] = [dist.new_group([*range(s * size, (s + 1) * size)]) for s in range(stages)]
    return _groups[stages, size]


def step(
    plan: str, graph: str, family: str, dim: int, rows: int, generated: bool = False
) -> tuple[float, dict[str, torch.Tensor], int, str]:
    model = build(family, dim)  # first: a graph may have operators that the model's module registers
    found, captured = Plan.from_json(plan), from_json(graph)
    staged = lower_stages(found, captured)
    staged.check()
    stage, rank = divmod(dist.get_rank(), staged.mesh.size)
    comm = Ranks(staged.mesh, rank, stage_groups(staged.stages, staged.mesh.size)[stage])
    batch = batch_of(captured, batch_for(family, rows, dim))
    runner = Generated if generated else Interpreter
    return metered_stage(staged, stage, comm, model, batch, found.optimizer, runner)


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
