"""One step of a plan with pipeline stages on real ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist

from scrimp import Plan
from scrimp.capture import from_json
from scrimp.lower import Generated, Interpreter, Ranks, lower_stages
from tests.support.lowering.run import batch_of
from tests.support.lowering.staged import batch_for, build, metered_stage

_groups: dict[tuple[int, int], list[dist.ProcessGroup]] = {}


def stage_groups(stages: int, size: int) -> list[dist.ProcessGroup]:
    """The group of each stage; made once, by all ranks."""
    if (stages, size) not in _groups:
        _groups[stages, size] = [dist.new_group([*range(s * size, (s + 1) * size)]) for s in range(stages)]
    return _groups[stages, size]


def step(
    plan: str, graph: str, family: str, dim: int, rows: int, generated: bool = False
) -> tuple[float, dict[str, torch.Tensor], int, str]:
    found, captured = Plan.from_json(plan), from_json(graph)
    staged = lower_stages(found, captured)
    staged.check()
    stage, rank = divmod(dist.get_rank(), staged.mesh.size)
    comm = Ranks(staged.mesh, rank, stage_groups(staged.stages, staged.mesh.size)[stage])
    batch = batch_of(captured, batch_for(family, rows, dim))
    runner = Generated if generated else Interpreter
    return metered_stage(staged, stage, comm, build(family, dim), batch, found.optimizer, runner)
