"""Fake tensors for a model's parameters, its buffers and a batch: shapes without bytes, on "cpu" whatever the real device.

On "cpu", because fake tensors on "meta" use other kernels (attention is decomposed), and fake tensors on a missing device end the
process.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from scrimp.capture.graph.graph import Parameter
from scrimp.capture.torch_private.joint import FakeTensorMode


def fake(mode: FakeTensorMode, like: Tensor, requires_grad: bool | None = None) -> Tensor:
    """A fake tensor like `like`, with a storage of its own. A parameter becomes a fake parameter."""
    grad = like.requires_grad if requires_grad is None else requires_grad
    with mode:
        made = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="cpu", requires_grad=grad)
        return nn.Parameter(made, requires_grad=grad) if isinstance(like, nn.Parameter) else made


def parameters_of(model: nn.Module) -> dict[int, Parameter]:
    """By the id of the tensor: a tied one has one name, the first."""
    found: dict[int, Parameter] = {}
    for name, tensor in model.named_parameters():
        found[id(tensor)] = _described(name, tensor, buffer=False)
    for name, held in model.named_buffers():
        found.setdefault(id(held), _described(name, held, buffer=True))
    return found


def _described(name: str, tensor: Tensor, buffer: bool) -> Parameter:
    trained = tensor.requires_grad and not buffer
    return Parameter(name=name, shape=tuple(tensor.shape), dtype=dtype_name(tensor.dtype), trained=trained, buffer=buffer)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@contextmanager
def faked(model: nn.Module, mode: FakeTensorMode) -> Iterator[dict[int, Parameter]]:
    """The model with fake parameters and buffers; yields what each fake, by id, replaces. The real ones come back at the end."""
    known = parameters_of(model)
    fakes: dict[int, Tensor] = {}
    real: list[tuple[dict[str, Tensor | None], str, Tensor]] = []
    try:
        for module in model.modules():
            for table in (module._parameters, module._buffers):
                for name, tensor in table.items():
                    if tensor is not None:
                        real.append((table, name, tensor))  # type: ignore[arg-type]
                        table[name] = fakes.setdefault(id(tensor), fake(mode, tensor))  # type: ignore[assignment]
        yield {id(made): known[number] for number, made in fakes.items()}
    finally:
        for table, name, tensor in real:
            table[name] = tensor
