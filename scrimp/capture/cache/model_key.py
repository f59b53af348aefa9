"""The key of a capture: everything that decides which graph `capture` makes of a model and a batch.

It covers the module tree with its settings and modes, names, shapes and dtypes of all tensors and which of them are one, the code
that the forward can reach (`walk.py`), the batch, torch's settings, and the sources of scrimp that capture. Values of tensors do
not count, because capture has none. A model with hooks has no key: they may hold anything.
"""

from __future__ import annotations

import hashlib
import platform
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from scrimp.capture.cache.walk import NotKeyedError, Walk
from scrimp.capture.torch_private.module_hooks import hooks_of_all_modules

SOURCES = ("capture", "layers", "planner/api.py")  # of scrimp, that decide a graph
BLANK = vars(nn.Module())
TREE = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "training")


def capture_key(model: nn.Module, *more: Any) -> str | None:
    """Equal keys mean equal graphs. `more`: plain data that decides the graph too, such as the shapes of the batch. None where
    the model holds something that cannot be seen through."""
    with suppress(NotKeyedError):
        return key_or_reason(model, *more)
    return None


def key_or_reason(model: nn.Module, *more: Any) -> str:
    """The key; raises `NotKeyedError` with the reason why there is none."""
    owned = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    walk = Walk(lambda walk, value: _taken(walk, value, owned))
    walk.say(*_surroundings())
    walk.visit(more)
    if hooks_of_all_modules():
        raise NotKeyedError("hooks on all modules")
    try:
        walk.visit(model)
    except RecursionError as error:
        raise NotKeyedError("objects nested too deeply") from error
    return walk.digest()


def _surroundings() -> tuple[Any, ...]:
    fused: Any = torch.backends.cuda
    mkldnn: Any = torch.backends.mkldnn
    return (
        sys.version, platform.machine(), torch.__version__, torch.version.git_version, _sources(),
        str(torch.get_default_dtype()), str(torch.get_default_device()), torch.are_deterministic_algorithms_enabled(),
        fused.flash_sdp_enabled(), fused.mem_efficient_sdp_enabled(), fused.math_sdp_enabled(), fused.cudnn_sdp_enabled(),
        torch.is_autocast_enabled("cpu"), mkldnn.is_available(), torch.backends.cpu.get_cpu_capability(),
    )  # fmt: skip


@cache
def _sources() -> str:
    found, root = hashlib.sha256(), Path(__file__).parents[2]
    for name in SOURCES:
        path = root / name
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            found.update(file.relative_to(root).as_posix().encode() + b"\0" + file.read_bytes())
    return found.hexdigest()


def _taken(walk: Walk, value: Any, owned: set[int]) -> bool:
    if isinstance(value, Tensor):
        if id(value) not in owned:
            raise NotKeyedError(f"a tensor of shape {tuple(value.shape)} that is neither a parameter nor a buffer")
        if type(value) not in (Tensor, nn.Parameter):
            raise NotKeyedError(f"a tensor of {type(value).__qualname__}")
        walk.say("tensor", type(value).__name__, tuple(value.shape), str(value.dtype), value.requires_grad)
        walk.attributes(vars(value))
        return True
    if isinstance(value, nn.Module):
        _module(walk, value)
        return True
    return False


def _module(walk: Walk, module: nn.Module) -> None:
    held = vars(module)
    for name, blank in BLANK.items():
        if name not in TREE and "state_dict" not in name and held.get(name, blank) != blank:
            raise NotKeyedError(f"{name} of {type(module).__qualname__}")
    walk.visit(type(module))
    walk.say("module", module.training, sorted(held.get("_non_persistent_buffers_set", ())))
    for table in (module._parameters, module._buffers, module._modules):
        walk.say("holds", [*table])
        for each in table.values():
            walk.visit(each)
    walk.attributes({name: value for name, value in held.items() if name not in BLANK})
