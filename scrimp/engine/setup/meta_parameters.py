"""What stands in the model between steps: its weights are not on the device then, and whoever read them there would crash
the process. So a stand-in on meta has each parameter's place, its shape and dtype, and no values.

What was done to the module tree meanwhile, and the engine cannot follow, is refused before a step begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from scrimp.engine.setup.adopt import Taken
from scrimp.engine.setup.empty_parameter import OPEN, Held, refuse
from scrimp.engine.setup.parameter_references import Set
from scrimp.engine.step.parameter_hooks import Hooks
from scrimp.errors import RunError

ANEW = "after such a change build a new model and Engine: engine.save(folder), Engine(new_model, ...), engine.load(folder)"


@dataclass(frozen=True, kw_only=True)
class _Seat:
    module: nn.Module
    attribute: str
    name: str
    weight: nn.Parameter
    stand_in: nn.Parameter
    references: list[Set]

    def put(self, parameter: nn.Parameter) -> None:
        self.module._parameters[self.attribute] = parameter
        for put in self.references:
            put(parameter)


class MetaParameters:
    """`weights` are the parameters that the engine trains, by every name they have."""

    def __init__(
        self,
        model: nn.Module,
        weights: Mapping[str, nn.Parameter],
        taken: Taken,
        hooks: Hooks,
        device: torch.device,
    ) -> None:
        self._model = model
        self._inside = False
        self._full: dict[int, nn.Parameter] = {}  # by the id of the weight: full parameters that stand in the model now
        self._modules = list(model.modules())
        self._size = self._count()
        self._seats = []
        for name, weight in weights.items():
            path, _, attribute = name.rpartition(".")
            stand_in = taken.meta_parameters[id(weight)]
            if stand_in.held is None or stand_in.held.weight is not weight:
                stand_in.held = Held(name=name, weight=weight, hooks=hooks, device=device)
            module = model.get_submodule(path)
            seat = _Seat(
                module=module,
                attribute=attribute,
                name=name,
                weight=weight,
                stand_in=stand_in,
                references=taken.references[id(weight)],
            )
            self._seats.append(seat)
        model.register_forward_pre_hook(self._called)
        model.register_state_dict_pre_hook(self._asked)  # type: ignore[no-untyped-call]
        model.register_load_state_dict_pre_hook(self._given)  # type: ignore[no-untyped-call]
        apply = model._apply

        def converted(fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
            for seat in self._seats:  # before any buffer is
                if not self._full and not self._inside and fn(seat.stand_in) is not seat.stand_in:
                    refuse(seat.stand_in, getattr(fn, "__name__", "apply"))  # type: ignore[arg-type]
            return apply(fn, recurse)  # type: ignore[no-any-return, no-untyped-call]

        model._apply = converted  # type: ignore[method-assign]
        self._leave()

    @contextmanager
    def away(self) -> Iterator[None]:
        """The weights themselves are in the model."""
        self._check()
        for seat in self._seats:
            seat.put(seat.weight)
        self._inside = True
        try:
            yield
        finally:
            self._inside = False
            self._leave()

    @contextmanager
    def full(self, parameters: Mapping[int, nn.Parameter]) -> Iterator[None]:
        """Full parameters are in the model, by the id of their weights; at the end each is checked to be still what it was."""
        self._check()
        chosen = [(seat, parameters[id(seat.weight)]) for seat in self._seats if id(seat.weight) in parameters]
        for seat, parameter in chosen:
            seat.put(parameter)
        self._full = dict(parameters)
        try:
            yield
            for seat, parameter in chosen:
                _still(seat, parameter)
        finally:
            self._full = {}
            self._leave()
        self._check()

    def check_closed(self) -> None:
        if self._full:
            raise RunError(
                "end the `with engine.full_parameters()` block first: what was edited there is written back at its end"
            )

    def _leave(self) -> None:
        for seat in self._seats:
            seat.put(seat.stand_in)

    def _count(self) -> int:
        return sum(len(module._parameters) + len(module._modules) for module in self._modules)

    def _check(self) -> None:
        self.check_closed()
        if self._inside:
            raise RunError("engine.step or engine.evaluate was called by the model that it is running")
        with torch._C.DisableTorchFunctionSubclass():
            for seat in self._seats:
                now = seat.module._parameters.get(seat.attribute)
                if now is not seat.stand_in:
                    raise RunError(f"parameter {seat.name} was replaced or removed after Engine took the model over; {ANEW}")
                if now.requires_grad != seat.weight.requires_grad:
                    raise RunError(
                        f"requires_grad of {seat.name} is {now.requires_grad}, it was {seat.weight.requires_grad} when Engine "
                        f"took the model over, and what is trained has its place by that; {ANEW}"
                    )
        if self._count() != self._size:
            raise RunError(f"modules or parameters were added to the model, or removed, after Engine took it over; {ANEW}")

    def _called(self, module: nn.Module, args: Any) -> None:
        if not self._inside:
            raise RunError(
                "the model was called outside of the engine, and its weights are not in it between steps: "
                "call engine.step(*batch) to train, engine.evaluate(*batch) for a forward without gradients, "
                "engine.evaluate(function, ...) for a function that calls the model, such as model.generate"
            )

    def _asked(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        if not self._full:
            raise RunError(
                f"model.state_dict(): the weights live in the engine; use engine.state_dict(), or engine.save(folder); {OPEN}"
            )

    def _given(self, module: nn.Module, *rest: Any) -> None:
        if not self._full:
            raise RunError(
                "model.load_state_dict(...): the weights live in the engine; give Engine(model, weights=...) the state dict, "
                f"or use engine.load(folder); {OPEN}"
            )


def _still(seat: _Seat, parameter: nn.Parameter) -> None:
    now = seat.module._parameters.get(seat.attribute)
    if now is not parameter:
        raise RunError(f"{seat.name} was replaced inside engine.full_parameters(); edit it in place: parameter.data.copy_(...)")
    want = (torch.float32, torch.device("cpu"), seat.weight.shape, seat.weight.requires_grad)
    got = (now.dtype, now.device, now.shape, now.requires_grad)
    if got != want:
        raise RunError(
            f"{seat.name} is {_words(got)} at the end of engine.full_parameters(), it was {_words(want)}; "
            "only values may be edited"
        )


def _words(what: tuple[torch.dtype, torch.device, torch.Size, bool]) -> str:
    dtype, device, shape, requires_grad = what
    return f"{dtype} of shape {tuple(shape)} on {device}, requires_grad={requires_grad}"
