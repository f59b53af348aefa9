"""Validates the arguments of `Engine`, and resolves their short forms."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

from scrimp._arguments import KEEP, OFFLOAD, RECOMPUTE
from scrimp.chunks import SGD, AdamW, Optimizer
from scrimp.engine.setup.budget import Memory
from scrimp.engine.setup.empty_parameter import EmptyParameter
from scrimp.engine.step.layer_forward import is_taken
from scrimp.errors import RunError
from scrimp.exchange import Dense, Sparse
from scrimp.layout import Mesh

OPTIMIZERS: dict[str, type[Optimizer]] = {"adamw": AdamW, "sgd": SGD}


def check_model(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise RunError(f"the model is a {type(model).__name__}; give a torch.nn.Module, such as zoo.build('gpt-tiny')")
    if is_taken(model) or any(isinstance(parameter, EmptyParameter) for parameter in model.parameters()):
        raise RunError("another engine has adopted this model; build a new model, and load what was saved into its engine")


def optimizer_of(given: Optimizer | str | None) -> Optimizer:
    """The optimizer; a name means its default settings."""
    if isinstance(given, str):
        if given not in OPTIMIZERS:
            raise RunError(
                f"optimizer={given!r}: the names are {', '.join(OPTIMIZERS)}; or give scrimp.AdamW(...), scrimp.SGD(...)"
            )
        return OPTIMIZERS[given]()
    if given is not None and not isinstance(given, (AdamW, SGD)):
        raise RunError(
            f"optimizer is a {type(given).__name__}; give scrimp.AdamW(...) or scrimp.SGD(...), which are plain data; "
            "scrimp.ext.optim.optimizer_of makes one from torch's"
        )
    return AdamW() if given is None else given


def mesh_of(given: Mesh | str | None) -> Mesh | None:
    return Mesh.parse(given) if isinstance(given, str) else given


def check_settings(
    precision: str, micro_batches: int, reduction: str, activations: tuple[str, ...], clip_norm: float | None
) -> None:
    if precision not in ("bf16", "fp16", "fp32"):
        raise RunError(f"precision {precision!r} is not one of 'bf16', 'fp16', 'fp32'")
    if isinstance(micro_batches, bool) or not isinstance(micro_batches, int) or micro_batches < 1:
        raise RunError(f"micro_batches={micro_batches!r}: it is the number of parts a batch is split into, 1 or more")
    if reduction not in ("mean", "sum"):
        raise RunError(f"reduction={reduction!r} is neither 'mean' nor 'sum'")
    if activations == (OFFLOAD,) or activations == (KEEP, OFFLOAD):
        raise RunError(
            f"activations={{{', '.join(map(repr, activations))}}}: the engine offloads the inputs of layers that it recomputes; "
            f"add {RECOMPUTE!r}"
        )
    if clip_norm is not None and not clip_norm > 0:
        raise RunError(f"clip_norm={clip_norm!r} must be more than 0")


def check_exchange(exchange: Dense | Sparse | None, optimizer: Optimizer, precision: str, memory: Memory) -> None:
    if exchange is None or isinstance(exchange, Dense):
        return
    if not isinstance(exchange, Sparse):
        raise RunError(f"exchange={exchange!r}: give scrimp.Dense() or scrimp.Sparse(density=...)")
    if memory.disk is not None:
        raise RunError(f"Memory(disk={str(memory.disk)!r}) with Sparse is not possible: it reads optimizer states entry by entry")
    if precision == "fp16":
        raise RunError("precision='fp16' with Sparse is not possible: an overflow would be found too late; use 'bf16' or 'fp32'")
    if optimizer.state != "fp32":
        raise RunError(
            f"AdamW(state={optimizer.state!r}) with Sparse is not possible: states are read entry by entry; use 'fp32'"
        )
    groups: Any = optimizer.groups
    for given in (vars(optimizer), *(overrides for _, overrides in groups)):
        for name in ("nesterov", "dampening"):
            if given.get(name):
                raise RunError(f"SGD({name}={given[name]!r}) with Sparse is not possible: momentum is taken before the exchange")


def check_group(group: object, plan: object, mesh: object, exchange: Dense | Sparse | None) -> None:
    """A training group that is a part of the default one."""
    if group is None:
        return
    for given, words in (
        (plan, "plan=..."),
        (mesh, "mesh=..."),
        (exchange if isinstance(exchange, Sparse) else None, "Sparse(...)"),
    ):
        if given is not None:
            raise RunError(
                f"Engine(group=...) with {words} is not possible: it trains with all ranks of the default process group; leave "
                "group out, and start only the ranks that train"
            )


def pick_device(requested: str | torch.device | None) -> torch.device:
    """The requested device; else this rank's GPU if there is one; else the CPU."""
    try:
        device = torch.device(requested or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError as error:
        raise RunError(f"device {str(requested)!r} is neither 'cuda' nor 'cpu', nor one GPU, such as 'cuda:1'") from error
    if device.type == "cpu":
        return device
    if device.type != "cuda":
        raise RunError(f"device {str(device)!r} is neither 'cuda' nor 'cpu'")
    if not torch.cuda.is_available():
        raise RunError(
            f"device {str(device)!r} was requested, and torch {torch.__version__} finds no CUDA device; `scrimp doctor` says more"
        )
    if device.index is not None and device.index >= torch.cuda.device_count():
        raise RunError(f"device {str(device)!r} was requested, and there are {torch.cuda.device_count()} GPUs, from 'cuda:0' on")
    if device.index is None:
        local = int(os.environ.get("LOCAL_RANK", -1))
        device = torch.device("cuda", local if 0 <= local < torch.cuda.device_count() else torch.cuda.current_device())
    torch.cuda.set_device(device)
    return device
