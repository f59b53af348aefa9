"""Plans with stages: models of eight layers, one process that accumulates micro-batches, and a rank with a meter."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from scrimp import Mesh, Plan, plan, zoo
from scrimp.capture import Graph
from scrimp.lower import Communicator, Interpreter, Pipeline, Runner, Staged, channels_of, later_axes, stage_buckets
from scrimp.move import ChannelPeers, Peers
from scrimp.planner import captured, precision_of
from scrimp.planner.cost.zero_levels import accumulating
from scrimp.planner.micro_batches import micro_batch
from tests.support.lowering.live_bytes import LiveBytes
from tests.support.lowering.run import STATES, Ran, _Metered, plainly, tensors_of

LAYERS = 8


def build(family: str, dim: int = 32) -> nn.Module:
    """T5 has half of its layers in its encoder. Without dropout, which ranks would not draw as one process does."""
    torch.manual_seed(0)
    if family != "t5":
        return zoo.build(f"{family}-tiny", layers=LAYERS, dim=dim)
    import transformers

    sizes = {"d_model": dim, "d_kv": dim // 4, "d_ff": 2 * dim, "num_layers": LAYERS // 2, "num_heads": 4, "dropout_rate": 0.0}
    config = transformers.T5Config(vocab_size=64, decoder_start_token_id=0, **sizes)
    return transformers.T5ForConditionalGeneration(config).train()  # type: ignore[no-any-return]


def batch_for(family: str, rows: int, dim: int = 32, step: int = 0) -> dict[str, torch.Tensor] | tuple[torch.Tensor, ...]:
    if family != "t5":
        return zoo.example_batch(f"{family}-tiny", rows, step=step, layers=LAYERS, dim=dim)  # type: ignore[no-any-return]
    tokens = torch.randint(0, 64, (rows, 16), generator=torch.Generator().manual_seed(step))
    return {"input_ids": tokens, "labels": tokens.flip(1).contiguous()}


def planned(model: nn.Module, batch: Any, mesh: str, stages: int, micro_batches: int, interleave: int, **settings: Any) -> Plan:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return plan(
            model, batch, f"{stages * Mesh.parse(mesh).size}xCPU", mesh=mesh, stages=stages, micro_batches=micro_batches,
            interleave=interleave, **{"precision": "fp32", "time_limit": 8, "gap": 0.05, **settings},
        )  # fmt: skip


def graph_of(found: Plan, model: nn.Module, batch: Any) -> Graph:
    """The graph of one micro-batch."""
    numbers = precision_of(found.precision, found.optimizer)
    assert numbers is not None
    assert found.schedule is not None
    return captured(model, micro_batch(batch, found.schedule.micro_batches), accumulating(numbers))


def accumulated(model: nn.Module, batch: Any, micro_batches: int) -> Ran:
    """One process: the mean over micro-batches."""
    every = [plainly(model, part) for part in parts(batch, micro_batches)]
    gradients = {name: sum(each.gradients[name] for each in every) / micro_batches for name in every[0].gradients}
    return Ran(sum(each.loss for each in every) / micro_batches, gradients)  # type: ignore[arg-type]


def parts(batch: Any, count: int) -> list[Any]:
    tensors = [*batch.values()] if isinstance(batch, Mapping) else [*batch]
    cuts = [*zip(*(tensor.chunk(count) for tensor in tensors), strict=True)]
    return [dict(zip(batch, each, strict=True)) for each in cuts] if isinstance(batch, Mapping) else cuts


def fixed_nbytes(staged: Staged, stage: int, optimizer: str) -> int:
    """Weights, gradients and states of a rank of a stage, in fp32."""
    total = 0
    for each in staged.rest[stage].values():
        total += 4 * each.numel(each.weight, staged.mesh)
        if each.trained:
            total += 4 * each.numel(each.gradient, staged.mesh) + STATES[optimizer] * each.numel(each.states, staged.mesh)
    return total


def metered_stage(
    staged: Staged, stage: int, comm: Communicator, model: nn.Module, batch: Mapping[str, torch.Tensor], optimizer: str,
    runner: type[Runner] = Interpreter, *, together: bool = False, channels: bool = False,
) -> tuple[float, dict[str, torch.Tensor], int, str]:  # fmt: skip
    """The loss, the stage's gradients, and the peak of all live storages and of what is at rest, with the place of the peak.
    `together`: moves run in buckets. `channels`: tensors travel between stages without tags, as over NCCL."""
    mine = staged.names(stage)
    later = later_axes([each.lowered for each in staged.pieces[stage :: staged.stages]], accumulated=True)
    whole = {name: each for name, each in tensors_of(model).items() if name in mine}
    buckets = stage_buckets(staged, stage, later) if together else None
    shards = _Metered(staged.rest[stage], comm, whole, later, buckets=buckets)
    size = staged.mesh.size
    peers = ChannelPeers(size, channels_of(staged), torch.device("cpu")) if channels else Peers(size)
    run, fixed = Pipeline(staged, stage, comm, shards, peers, runner), fixed_nbytes(staged, stage, optimizer)
    now = [""]

    def before(layer: Any, step: Any) -> None:
        now[0] = f"{layer.path} {step}"

    for each_runner in run.runners.values():
        if isinstance(each_runner, Interpreter):
            each_runner.before = before
    shards.meter = LiveBytes(lambda: now[0])
    with shards.meter:
        for tensor in (*shards.weights.values(), *shards.buffers.values()):
            shards.meter.ignore(tensor)
        loss = run.step(batch)
    gradients = {name: shards.whole_gradient(name) for name in shards.gradients}
    peers.close()
    return float(loss), gradients, shards.meter.peak + fixed, shards.meter.at
