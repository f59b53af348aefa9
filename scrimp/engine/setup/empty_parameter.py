"""`EmptyParameter`: the user's own Parameter object between steps, without values. The engine holds the weight.

So a variable, a hook or an optimizer that holds the object does not hold stale values. An empty parameter tells its shape, dtype
and the engine's device, and forwards hooks to the weight. Everything else would have no effect on the weight, so it raises and
names `engine.full_parameters()`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils import swap_tensors

from scrimp._warnings import warn
from scrimp.engine.step.parameter_hooks import Hooks
from scrimp.errors import RunError

OPEN = "`with engine.full_parameters() as model:` gives fp32 masters on the host to read and edit, and writes back what changed"
NO_COPY = (
    "a model that an engine has adopted cannot be copied or pickled: its weights live in the engine; "
    "copy it before Engine(model), or load engine.state_dict() into a new one"
)

# Methods that need no values, or make a new tensor of the same shape.
TOLD = {
    "size", "dim", "ndimension", "numel", "nelement", "element_size", "stride", "storage_offset", "is_floating_point",
    "is_complex", "is_contiguous", "is_signed", "is_inference", "is_pinned", "is_shared", "is_conj", "is_neg", "get_device",
    "__hash__", "__len__", "__dir__", "requires_grad_", "is_same_size", "dense_dim", "sparse_dim", "untyped_storage", "data_ptr",
    "_use_count", "_is_view", "_has_compatible_shallow_copy_type", "empty_like", "zeros_like", "ones_like", "full_like",
    "new_empty", "new_zeros", "new_ones", "new_full", "new_tensor",
}  # fmt: skip
CASTS = {
    "float": torch.float32, "half": torch.float16, "bfloat16": torch.bfloat16, "double": torch.float64,
}  # fmt: skip
VIEWS = {"T", "mT", "H", "mH", "real", "imag"}  # attributes that make a view, and so need values
VALUES = {"data", *VIEWS}


class EmptyParameter(nn.Parameter):
    """A parameter without values. `held` is None until the engine has adopted its weight."""

    held: Held | None = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        mine = next((leaf for leaf in (*args, *kwargs.values()) if isinstance(leaf, EmptyParameter)), None)
        if mine is None or mine.held is None:  # the engine is being built, and may access it
            pass
        elif name in ("__get__", "__set__"):
            attribute = func.__self__.__name__
            given = args[1] if name == "__set__" else None
            if name == "__get__" and attribute == "device":
                return mine.held.device  # where the weight is when its layer runs, so that inputs are made there
            allowed = attribute not in VALUES if name == "__get__" else (attribute != "data" and given is None) or given is mine
            if not allowed and attribute != "requires_grad":
                refuse(mine, attribute)
        elif name == "detach":
            return mine  # for names of a module's state_dict; what uses its values raises
        elif name in ("to", "cuda", "cpu", *CASTS):
            return _converted(mine, name, args[1:], kwargs)
        elif name not in TOLD:
            refuse(mine, name)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    def register_hook(self, hook: Callable[[torch.Tensor], Any]) -> Any:
        return self._weight.register_hook(hook)  # type: ignore[no-untyped-call]

    def register_post_accumulate_grad_hook(self, hook: Callable[[torch.Tensor], Any]) -> Any:
        return self._held.hooks.add(self._weight, self._held.name, hook)

    @property
    def _held(self) -> Held:
        if self.held is None:
            raise RunError("this parameter's engine is not there yet, or could not be made")
        return self.held

    @property
    def _weight(self) -> nn.Parameter:
        return self._held.weight

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise RunError(NO_COPY)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise RunError(NO_COPY)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Parameter(shape={tuple(self.shape)}, dtype={self.dtype}, requires_grad={self.requires_grad}, held by the engine)"


@dataclass(frozen=True, kw_only=True)
class Held:
    """The engine's weight that an empty parameter refers to."""

    name: str
    weight: nn.Parameter
    hooks: Hooks
    device: torch.device


def emptied(parameter: nn.Parameter, name: str, dtype: torch.dtype) -> EmptyParameter:
    """Empties the parameter object in place. If something prevents that, makes a new object and warns."""
    made = EmptyParameter(torch.empty(parameter.shape, dtype=dtype, device="meta"), requires_grad=parameter.requires_grad)
    vars(made).update({key: value for key, value in vars(parameter).items() if key != "held"})
    try:
        swap_tensors(parameter, made)  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        warn(
            f"{name}: something else holds this parameter ({str(error).splitlines()[0]}); "
            "what is done through it has no effect on the engine's weight"
        )
        return made
    assert isinstance(parameter, EmptyParameter)
    return parameter


def refuse(empty: EmptyParameter | None, what: str) -> NoReturn:
    name = empty.held.name if empty is not None and empty.held is not None else "a parameter"
    raise RunError(f"{name}: '{what}' has no values to work on between steps, since the weights live in the engine; {OPEN}")


def _converted(empty: EmptyParameter | None, name: str, args: Any, kwargs: Any) -> EmptyParameter:
    """Accepts a conversion to the dtype and device that the weight already has; raises for others."""
    assert empty is not None
    with torch._C.DisableTorchFunctionSubclass():
        if name == "to":
            device, dtype, _, _ = torch._C._nn._parse_to(*args, **{k: v for k, v in kwargs.items() if k != "copy"})
        elif name in CASTS:
            device, dtype = None, CASTS[name]
        else:
            device, dtype = torch.device("cpu") if name == "cpu" else torch.device("cuda", *args[:1]), None
        held, mine = empty.held, empty.dtype
    there = held.device if held is not None else None
    same_device = device is None or (
        there is not None and device.type == there.type and (device.index is None or device.index == there.index)
    )
    if same_device and dtype in (None, mine):
        return empty
    wanted = " and ".join(str(what) for what in (dtype, device) if what is not None)
    raise RunError(
        f"{held.name if held is not None else 'a parameter'}: the engine's weights are {mine} on {there} and cannot be converted "
        f"to {wanted}; choose Engine(model, precision=..., device=...) when you build it. {OPEN}"
    )
