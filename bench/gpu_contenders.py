"""Ways to train a GPT on one GPU that is too small for it, each as a builder that returns a function from batch to loss.

All of them train the same model from the same seed in the same precision: bf16 weights and gradients, fp32 masters and
AdamW states, every block recomputed, the same chunked loss, the same clipping.
"""

from __future__ import annotations

import importlib.util
import os
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import scrimp
from scrimp import zoo

Step = Callable[[tuple[torch.Tensor, ...]], torch.Tensor]
LR = 1e-6


@dataclass(frozen=True, kw_only=True)
class Case:
    """One point: the model, the batch, the cap on the GPU, clipping."""

    layers: int
    dim: int
    batch: int
    seq: int = 1024
    vocab: int = 50304
    cap: str = "24GiB"
    clip: bool = False
    device: str = "cuda"

    @property
    def shape(self) -> dict[str, int]:
        heads = max(1, self.dim // 128)
        return {"dim": self.dim, "heads": heads, "layers": self.layers, "vocab": self.vocab, "seq": self.seq}

    def on_meta(self) -> nn.Module:
        with torch.device("meta"):
            return zoo.build("gpt-tiny", head_loss=partial(scrimp.chunked_cross_entropy, chunk=2048), **self.shape)

    def model(self, device: str) -> nn.Module:
        model = self.on_meta()
        first = First(model, self.device)
        made = {id(p): nn.Parameter(first[name].to(device)) for name, p in model.named_parameters()}
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    module._parameters[name] = made[id(parameter)]
        return model

    def data(self) -> tuple[torch.Tensor, ...]:
        return zoo.example_batch("gpt-tiny", batch=self.batch, step=0, **self.shape)


class First(Mapping[str, torch.Tensor]):
    """The weights that all contenders begin with, drawn by name, one at a time, where that is quick."""

    def __init__(self, model: nn.Module, device: str) -> None:
        self._shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        self._device = device

    def __getitem__(self, name: str) -> torch.Tensor:
        shape = self._shapes[name]
        if len(shape) == 1:
            return (torch.zeros if name.endswith("bias") else torch.ones)(shape, device=self._device)
        draw = torch.Generator(self._device).manual_seed(zlib.crc32(name.encode()))
        return torch.randn(shape, generator=draw, device=self._device) * 0.02

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


def recompute_blocks(model: nn.Module) -> None:
    for block in model.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def by_scrimp(case: Case) -> Step:
    clip = 1.0 if case.clip else None
    model = case.on_meta()
    engine = scrimp.Engine(
        model,
        weights=First(model, case.device),
        optimizer=scrimp.AdamW(lr=LR),
        memory=scrimp.Memory(device=case.cap),
        recompute="all",
        clip_norm=clip,
        skip_nonfinite=False,
        device=case.device,
    )
    return lambda batch: engine.step(*batch)


def by_plain(case: Case) -> Step:
    """Everything on the GPU: bf16 weights, fp32 masters, torch's fused AdamW."""
    model = case.model(case.device)
    recompute_blocks(model)
    weights = list(model.parameters())
    masters = [weight.detach().float().clone() for weight in weights]
    for weight in weights:
        weight.data = weight.data.to(torch.bfloat16)
    optimizer = torch.optim.AdamW(masters, lr=LR, fused=True)

    def step(batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        loss = model(*(tensor.to(case.device) for tensor in batch))
        loss.backward()
        for weight, master in zip(weights, masters, strict=True):
            master.grad, weight.grad = weight.grad.float(), None
        if case.clip:
            nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.step()
        with torch.no_grad():
            for weight, master in zip(weights, masters, strict=True):
                weight.copy_(master)
                master.grad = None
        return loss.detach()

    return step


def by_fsdp2(case: Case) -> Step:
    """PyTorch's own: fully_shard with CPU offload, prefetching both ways, fused AdamW on the CPU."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    _join_alone(case.device)
    mesh = init_device_mesh(case.device, (1,))
    model = case.model("cpu")
    recompute_blocks(model)
    cuda = case.device == "cuda"
    settings: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
        "offload_policy": CPUOffloadPolicy(pin_memory=cuda),
    }
    blocks = [fully_shard(block, **settings) for block in model.blocks]
    fully_shard(model, **settings)
    for before, after in pairwise(blocks):
        before.set_modules_to_forward_prefetch([after])
        after.set_modules_to_backward_prefetch([before])
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)

    def step(batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        loss = model(*(tensor.to(case.device) for tensor in batch))
        loss.backward()
        if case.clip:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def by_deepspeed(case: Case, stage: int) -> Step:
    import deepspeed

    _join_alone(case.device)
    model = case.model("cpu")
    recompute_blocks(model)
    offload = {"device": "cpu", "pin_memory": True}
    config = {
        "train_micro_batch_size_per_gpu": case.batch,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0 if case.clip else 0.0,
        "zero_optimization": {
            "stage": stage,
            "offload_optimizer": offload,
            **({"offload_param": offload} if stage == 3 else {}),
            "overlap_comm": True,
        },
        "optimizer": {"type": "AdamW", "params": {"lr": LR}},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)

    def step(batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        loss = engine(*(tensor.to(case.device) for tensor in batch))
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


def _join_alone(device: str) -> None:
    store = torch.distributed.FileStore(os.path.join(tempfile.mkdtemp(), "store"), 1)
    torch.distributed.init_process_group("nccl" if device == "cuda" else "gloo", store=store, rank=0, world_size=1)


CONTENDERS: dict[str, Callable[[Case], Step]] = {
    "scrimp": by_scrimp,
    "plain PyTorch": by_plain,
    "FSDP2 offload": by_fsdp2,
    "DeepSpeed ZeRO-2 offload": partial(by_deepspeed, stage=2),
    "DeepSpeed ZeRO-3 offload": partial(by_deepspeed, stage=3),
}


def available(name: str) -> bool:
    return not name.startswith("DeepSpeed") or importlib.util.find_spec("deepspeed") is not None
