"""One step of a plan on real ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from scrimp import Mesh, Plan, RunError, zoo
from scrimp.capture import from_json
from scrimp.lower import Ranks, digest, lower
from tests.support.lowering.run import at_rest_nbytes, batch_of, metered, tensors_of


def step(
    plan: str, graph: str, name: str, settings: dict[str, Any], rows: int
) -> tuple[float, dict[str, torch.Tensor], int, str]:
    """The loss, the gradients, and the peak of all live storages and where it was, staging of moves included."""
    found, captured = Plan.from_json(plan), from_json(graph)
    torch.manual_seed(0)
    model = zoo.build(name, **settings)
    batch = batch_of(captured, zoo.example_batch(name, rows, **settings))
    lowered = lower(found, captured)
    Ranks(found.mesh, dist.get_rank()).agree(digest(lowered))
    loss, meter, shards = metered(lowered, Ranks(found.mesh, dist.get_rank()), tensors_of(model), batch)
    gradients = {each: shards.whole_gradient(each) for each in shards.gradients}
    return loss, gradients, meter.peak + at_rest_nbytes(lowered, found.optimizer), meter.at


def disagree(mesh: str) -> str:
    """What a rank says where the last one has lowered other steps."""
    last = dist.get_rank() == dist.get_world_size() - 1
    try:
        Ranks(Mesh.parse(mesh), dist.get_rank()).agree("f" * 64 if last else "0" * 64)
    except RunError as error:
        return str(error)
    return ""
