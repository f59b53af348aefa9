"""One step of a plan on real ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from scrimp import Mesh, Plan, RunError, zoo
from scrimp.capture import from_json
from scrimp.lower import Generated, Ranks, Shards, cut, digest, later_axes, lower, module
from tests.support.lowering.run import at_rest_nbytes, batch_of, metered, tensors_of
from tests.support.same_experts import to_the_first_two


def step(
    plan: str, graph: str, name: str, settings: dict[str, Any], rows: int, same_experts: bool = False
) -> tuple[float, dict[str, torch.Tensor], int, str]:
    """The loss, the gradients, and the peak of all live storages and where it was, staging of moves included."""
    found, captured = Plan.from_json(plan), from_json(graph)
    torch.manual_seed(0)
    model = zoo.build(name, **settings)
    if same_experts:
        to_the_first_two(model)
    batch = batch_of(captured, zoo.example_batch(name, rows, **settings))
    lowered = lower(found, captured)
    Ranks(found.mesh, dist.get_rank()).agree(digest(lowered))
    loss, meter, shards = metered(lowered, Ranks(found.mesh, dist.get_rank()), tensors_of(model), batch)
    gradients = {each: shards.whole_gradient(each) for each in shards.gradients}
    return loss, gradients, meter.peak + at_rest_nbytes(lowered, found.optimizer), meter.at


def step_on_gpu(plan: str, graph: str, name: str, settings: dict[str, Any], rows: int) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss and the gradients; communication over NCCL."""
    found, captured = Plan.from_json(plan), from_json(graph)
    torch.manual_seed(0)
    model = zoo.build(name, **settings)
    batch = batch_of(captured, zoo.example_batch(name, rows, **settings))
    lowered, comm = lower(found, captured), Ranks(found.mesh, dist.get_rank())
    comm.agree(digest(lowered), "cuda")
    shards = Shards(lowered.rest, comm, tensors_of(model), later_axes((lowered,), accumulated=False), device="cuda")
    part = {each: cut(tensor, lowered.batch[each], comm.mesh, comm.rank).cuda() for each, tensor in batch.items()}
    loss = Generated(lowered, comm, shards, device="cuda").step(part)
    return float(loss), {each: shards.whole_gradient(each).cpu() for each in shards.gradients}


def layer(
    plan: str, graph: str, path: str, model: nn.Module, whole: torch.Tensor, device: str
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """A lowered layer on a whole input that every rank has: the result, the input's gradient, and those of this rank's tiles."""
    lowered = module(Plan.from_json(plan), path, model, graph=from_json(graph)).to(device)
    given = whole.to(device).requires_grad_()
    made = lowered(given)
    made.square().sum().backward()
    assert given.grad is not None
    gradients = {name: each.grad.cpu() for name, each in lowered.named_parameters() if each.grad is not None}
    return made.detach().cpu(), given.grad.cpu(), gradients


def disagree(mesh: str) -> str:
    """What a rank says where the last one has lowered other steps."""
    last = dist.get_rank() == dist.get_world_size() - 1
    try:
        Ranks(Mesh.parse(mesh), dist.get_rank()).agree("f" * 64 if last else "0" * 64)
    except RunError as error:
        return str(error)
    return ""
