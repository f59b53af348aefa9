"""The same training step by scrimp's plan and by PyTorch, on the ranks: what `in_turns` measures.

PyTorch's tensor parallelism splits what the plan splits: query, key, value and the first matrix of the MLP by columns, the others
by rows, embedding and head by the vocabulary, and the loss runs on split logits. PyTorch's FSDP shards each block and the rest.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module

from scrimp import SGD, Engine, Plan, zoo

MODEL = "gpt-tiny"
SCRIMP, DTENSOR, FSDP = "scrimp", "DTensor", "FSDP2"
OPTIMIZER = SGD(lr=1e-2, momentum=0.9)
LOOPBACK = Path("/proc/net/dev")

Step = Callable[[], float]  # returns the loss of this rank's rows


class LocalHeads(nn.Module):
    """Attention over this rank's heads. The rows of `qkv` are reordered so that a rank's part of them is query, key and value of
    its heads."""

    def __init__(self, given: nn.Module, ranks: int) -> None:
        super().__init__()
        self.qkv, self.out, self.heads = given.qkv, given.out, given.heads // ranks
        for each in self.qkv.parameters():
            each.data = each.data.unflatten(0, (3, ranks, -1)).transpose(0, 1).flatten(0, 2).contiguous()

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*mixed.unbind(0), is_causal=True)
        y: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return y


def built(shape: dict[str, int]) -> nn.Module:
    torch.manual_seed(0)
    return zoo.build(MODEL, **shape)


def by_scrimp(plan: str, shape: dict[str, int], batch: tuple[Tensor, ...]) -> Step:
    found = Plan.from_json(plan)
    engine = Engine(built(shape), plan=found, optimizer=OPTIMIZER, precision=found.precision, device="cpu")
    return lambda: float(engine.step(*batch))


def by_dtensor(shape: dict[str, int], batch: tuple[Tensor, ...]) -> Step:
    model: Any = built(shape)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        block.attention = LocalHeads(block.attention, mesh.size())
        split = {"attention.qkv": ColwiseParallel(), "attention.out": RowwiseParallel()}
        parallelize_module(block, mesh, {**split, "mlp.up": ColwiseParallel(), "mlp.down": RowwiseParallel()})
    ends = {
        "embed": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(model, mesh, ends)
    model.reset_parameters()  # ties embedding and head again
    update = _optimizer(model)

    def step() -> float:
        update.zero_grad()
        with loss_parallel():
            loss = model(*batch)
            loss.backward()
        update.step()
        return (loss.full_tensor() if isinstance(loss, DTensor) else loss).item()  # type: ignore[no-any-return]

    return step


def by_fsdp(shape: dict[str, int], batch: tuple[Tensor, ...]) -> Step:
    model: Any = built(shape)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    update = _optimizer(model)
    mine = [tensor.chunk(mesh.size())[mesh.get_local_rank()] for tensor in batch]

    def step() -> float:
        update.zero_grad()
        loss = model(*mine)
        loss.backward()
        update.step()
        return loss.item()  # type: ignore[no-any-return]

    return step


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    settings = {"momentum": OPTIMIZER.momentum, "weight_decay": OPTIMIZER.weight_decay}
    return torch.optim.SGD(model.parameters(), lr=OPTIMIZER.lr, **settings)


def in_turns(plan: str, contender: str, shape: dict[str, int], rows: int, *, warm_up: int, rounds: int) -> dict[str, Any]:
    """Runs on every rank. Of each way the loss of the whole batch in each step of the warm-up, and the seconds and the bytes on
    the loopback of each step behind it, between barriers."""
    batch = zoo.example_batch(MODEL, rows, **shape)
    other = {DTENSOR: by_dtensor, FSDP: by_fsdp}[contender]
    steps: dict[str, Step] = {SCRIMP: by_scrimp(plan, shape, batch), contender: other(shape, batch)}
    losses = {name: [_mean(step()) for _ in range(warm_up)] for name, step in steps.items()}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    nbytes: dict[str, list[int]] = {name: [] for name in steps}
    for turn in range(rounds):
        for name in [*steps] if turn % 2 else [*reversed(steps)]:
            dist.barrier()
            before, start = sent_nbytes(), time.perf_counter()
            steps[name]()
            dist.barrier()
            seconds[name].append(time.perf_counter() - start)
            nbytes[name].append(sent_nbytes() - before)
    return {"losses": losses, "seconds": seconds, "nbytes": {name: statistics.median(each) for name, each in nbytes.items()}}


def _mean(loss: float) -> float:
    """Over the ranks: under data parallelism PyTorch's loss is that of a rank's rows."""
    found = torch.tensor(loss, dtype=torch.float64)
    dist.all_reduce(found)
    return float(found) / dist.get_world_size()


def sent_nbytes() -> int:
    """What this machine has sent to itself so far; 0 where the system does not tell."""
    with suppress(OSError):
        for line in LOOPBACK.read_text().splitlines():
            name, _, fields = line.partition(":")
            if name.strip() == "lo":
                return int(fields.split()[8])
    return 0
