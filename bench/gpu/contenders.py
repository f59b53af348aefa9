"""Ways to train a model on one GPU that is too small for it: each a builder that returns a `Training`.

All of them train the same model from the same weights in the same precision: bf16 weights and gradients, fp32 masters and
AdamW states, the same blocks recomputed, the same loss, the same clipping. What cannot be had so is said in its docstring.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.machinery import PathFinder
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import scrimp
from bench.gpu.cases import ACTIVATIONS, Case, First
from bench.gpu.contenders_folder import FOLDER

WEIGHT_DECAY = 1e-2


@dataclass(frozen=True, kw_only=True)
class Training:
    """`step` gives the loss; `clip` sets the norm that gradients are clipped to, and is None where there is no clipping;
    `wait` until all that a step began is done; `report` is what is asked after each mode."""

    step: Callable[[], torch.Tensor]
    clip: Callable[[float | None], None] | None = None
    wait: Callable[[], None] = lambda: None
    report: Callable[[], dict[str, Any]] = dict


def by_scrimp(case: Case) -> Training:
    fields = {field.name for field in dataclasses.fields(scrimp.AdamW)}
    if case.states != "fp32" and "state" not in fields:
        raise NotImplementedError(f"AdamW has no {case.states} states yet")
    states = {"state": case.states} if case.states != "fp32" else {}
    model, batch = case.on_meta(), case.batch_of()
    engine = scrimp.Engine(
        model,
        weights=First(model, case.device),
        optimizer=scrimp.AdamW(lr=case.lr, weight_decay=WEIGHT_DECAY, **states),
        memory=scrimp.Memory(device=case.cap, host=case.host),
        activations=ACTIVATIONS[case.recompute],
        skip_nonfinite=False,
        device=case.device,
    )

    def report() -> dict[str, Any]:
        try:
            bound = engine.bound()
        except scrimp.ScrimpError as error:
            return {"bound": {"text": str(error)}}
        named = {name for name, value in vars(type(bound)).items() if isinstance(value, property)}
        terms = {**dataclasses.asdict(bound), **{name: getattr(bound, name) for name in named}}
        return {"bound": {"text": str(bound), **terms}, "ledger": str(engine.ledger)}

    return Training(
        step=lambda: engine.step(**batch), clip=partial(setattr, engine._run, "clip_norm"), wait=engine._run.wait, report=report
    )


def by_plain(case: Case) -> Training:
    """Everything on the GPU: bf16 weights, fp32 masters, torch's fused AdamW."""
    model, clip = case.filled(case.device), _Clip()
    recompute_blocks(case, model)
    weights = list(model.parameters())
    masters = [weight.detach() for weight in weights]
    for weight in weights:
        weight.data = weight.data.to(torch.bfloat16)
    optimizer = torch.optim.AdamW(masters, lr=case.lr, weight_decay=WEIGHT_DECAY, fused=True)
    forward = _forward(case, model)

    def step() -> torch.Tensor:
        loss = forward()
        loss.backward()
        for weight, master in zip(weights, masters, strict=True):
            assert weight.grad is not None
            master.grad, weight.grad = weight.grad.float(), None
        clip(masters)
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(weights, masters)
        optimizer.zero_grad()
        return loss.detach()

    return Training(step=step, clip=clip.set)


def by_compute(case: Case) -> Training:
    """Forward and backward of bf16 weights on the GPU, and nothing else: what compute alone takes. Nothing is learnt."""
    model = case.filled(case.device, torch.bfloat16)
    recompute_blocks(case, model)
    forward = _forward(case, model)

    def step() -> torch.Tensor:
        loss = forward()
        loss.backward()
        model.zero_grad()
        return loss.detach()

    return Training(step=step)


def by_fsdp2(case: Case, *, keep: bool = False) -> Training:
    """PyTorch's own: fully_shard with CPU offload, prefetching both ways, fused AdamW on the CPU. `keep`: weights stay on the
    GPU from forward to backward, for who has the room."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    join_alone("cpu:gloo,cuda:nccl" if case.device == "cuda" else "gloo")  # norms of gradients are taken on the host
    model, clip = case.on_meta(), _Clip()
    first, blocks = First(model, case.device), case.blocks(model)
    recompute_blocks(case, model)
    settings: dict[str, Any] = {
        "mesh": init_device_mesh(case.device, (1,)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
        "offload_policy": CPUOffloadPolicy(pin_memory=case.device == "cuda"),
        "reshard_after_forward": not keep,
    }
    for block in blocks:  # each goes to the host before the next is made
        first.fill(block, case.device)
        fully_shard(block, **settings)
    first.fill(model, case.device)
    case.fill_buffers(model)
    fully_shard(model, **settings)
    for before, after in pairwise(blocks):
        before.set_modules_to_forward_prefetch([after])
        after.set_modules_to_backward_prefetch([before])
    optimizer = torch.optim.AdamW(model.parameters(), lr=case.lr, weight_decay=WEIGHT_DECAY, fused=True)
    forward = _forward(case, model)

    def step() -> torch.Tensor:
        loss = forward()
        loss.backward()
        clip(list(model.parameters()))
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Training(step=step, clip=clip.set)


def by_deepspeed(case: Case, stage: int) -> Training:
    """It makes masters of bf16 weights, whatever it is given; they are set anew, or its curve would be another."""
    if case.device == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ.update({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"})
    import deepspeed
    from deepspeed.utils import safe_set_full_fp32_param
    from torch.utils.cpp_extension import get_default_build_root

    for lock in Path(get_default_build_root()).glob("*/*/lock"):
        lock.unlink()  # of a build that was ended half-way: it would be waited for without end
    join_alone("nccl" if case.device == "cuda" else "gloo")
    model = case.filled("cpu", torch.bfloat16)
    recompute_blocks(case, model)
    offload = {"device": "cpu", "pin_memory": case.device == "cuda"}
    config = {
        "train_micro_batch_size_per_gpu": case.batch,
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": stage,
            "offload_optimizer": offload,
            **({"offload_param": offload} if stage == 3 else {}),
            "overlap_comm": True,
            "reduce_bucket_size": 200_000_000,
        },
        "optimizer": {"type": "AdamW", "params": {"lr": case.lr, "weight_decay": WEIGHT_DECAY}},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    first, forward = First(case.on_meta(), case.device), _forward(case, engine)
    for name, parameter in model.named_parameters():
        safe_set_full_fp32_param(parameter, first[name])

    def step() -> torch.Tensor:
        loss = forward()
        engine.backward(loss)
        engine.step()
        return loss.detach()

    def clip(norm: float | None) -> None:
        engine.optimizer.clip_grad = norm or 0.0  # read at every step; 0 is its word for none

    return Training(step=step, clip=clip)


def by_torchao(case: Case) -> Training:
    """torchao keeps the device's dtype on the host, so masters are an optimizer's own affair, here `_Master`. It takes
    gradients away before their norm could be known: no clipping."""
    from torchao.optim import CPUOffloadOptimizer

    model = case.filled(case.device, torch.bfloat16)
    recompute_blocks(case, model)
    optimizer = CPUOffloadOptimizer(model.parameters(), _Master, offload_gradients=True, lr=case.lr)
    first, forward = First(case.on_meta(), case.device), _forward(case, model)
    for name, weight in model.named_parameters():
        if weight in optimizer.optim_dict:  # the small ones, which stay on the GPU, begin with numbers that bf16 has
            optimizer.optim_dict[weight].begin([first[name].cpu()])

    def step() -> torch.Tensor:
        loss = forward()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Training(step=step)


class _Master(torch.optim.Optimizer):
    """Fused AdamW of fp32 masters, from given values or else from the weights as they are at the first step."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self._weights = [weight for group in self.param_groups for weight in group["params"]]
        self._masters: list[torch.Tensor] = []

    def begin(self, masters: list[torch.Tensor]) -> None:
        self._masters = masters
        self._adamw = torch.optim.AdamW(masters, lr=self.defaults["lr"], weight_decay=WEIGHT_DECAY, fused=True)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        if not self._masters:
            self.begin([weight.float() for weight in self._weights])
        for weight, master in zip(self._weights, self._masters, strict=True):
            master.grad = weight.grad.float()
        self._adamw.step()
        for weight, master in zip(self._weights, self._masters, strict=True):
            weight.copy_(master)
            master.grad = None


class _Clip:
    """Clipping that can be switched on and off between steps."""

    norm: float | None = None

    def set(self, norm: float | None) -> None:
        self.norm = norm

    def __call__(self, parameters: list[torch.Tensor]) -> None:
        if self.norm is not None:
            nn.utils.clip_grad_norm_(parameters, self.norm)


def recompute_blocks(case: Case, model: nn.Module) -> None:
    if case.recompute == "all":
        for block in case.blocks(model):
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)  # type: ignore[method-assign]


def _forward(case: Case, model: Any) -> Callable[[], torch.Tensor]:
    batch = case.batch_of()

    def forward() -> torch.Tensor:
        out = model(**{name: tensor.to(case.device) for name, tensor in batch.items()})
        loss: torch.Tensor = out if isinstance(out, torch.Tensor) else out.loss
        return loss

    return forward


def join_alone(backend: str) -> None:
    """A process group of this process alone."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a machine may have no other that leads anywhere
    store = torch.distributed.FileStore(os.path.join(tempfile.mkdtemp(), "store"), 1)
    torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)


SCRIMP, PLAIN, COMPUTE, FSDP2, TORCHAO = "scrimp", "plain PyTorch", "compute alone", "FSDP2 offload", "torchao offload"
FSDP2_KEPT = "FSDP2 offload, weights kept"
ZERO2, ZERO3 = "DeepSpeed ZeRO-2 offload", "DeepSpeed ZeRO-3 offload"
CONTENDERS: dict[str, Callable[[Case], Training]] = {
    SCRIMP: by_scrimp,
    PLAIN: by_plain,
    COMPUTE: by_compute,
    FSDP2: by_fsdp2,
    FSDP2_KEPT: partial(by_fsdp2, keep=True),
    ZERO2: partial(by_deepspeed, stage=2),
    ZERO3: partial(by_deepspeed, stage=3),
    TORCHAO: by_torchao,
}
PACKAGES = {ZERO2: "deepspeed", ZERO3: "deepspeed", TORCHAO: "torchao"}


def available(name: str) -> bool:
    return name not in PACKAGES or PathFinder.find_spec(PACKAGES[name], [*sys.path, str(FOLDER)]) is not None
