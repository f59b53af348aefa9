"""What stands in the model between steps: its weights are not on the device then, and whoever read them there would crash
the process. So each parameter is replaced by a stand-in on meta, which has its shape and dtype and no values.

A stand-in also shows what was done to the model meanwhile. What the engine cannot follow is refused before a step begins.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from scrimp.errors import RunError

ANEW = "after such a change build a new model and Engine: engine.save(folder), Engine(new_model, ...), engine.load(folder)"


@dataclass(frozen=True, kw_only=True)
class _Seat:
    module: nn.Module
    attribute: str
    name: str
    weight: nn.Parameter
    stand_in: nn.Parameter
    version: int


class StandIns:
    """`weights` are the parameters that the engine trains, by every name they have."""

    def __init__(self, model: nn.Module, weights: Mapping[str, nn.Parameter]) -> None:
        self._model = model
        self._inside = False
        self._modules = list(model.modules())
        self._size = self._count()
        stand_ins = {
            id(weight): nn.Parameter(torch.empty_like(weight, device="meta"), requires_grad=weight.requires_grad)
            for weight in weights.values()
        }
        self._seats = []
        for name, weight in weights.items():
            path, _, attribute = name.rpartition(".")
            module = model.get_submodule(path)
            self._seats.append(
                _Seat(
                    module=module,
                    attribute=attribute,
                    name=name,
                    weight=weight,
                    stand_in=stand_ins[id(weight)],
                    version=stand_ins[id(weight)]._version,
                )
            )
        model.register_forward_pre_hook(self._called)
        model.register_state_dict_pre_hook(self._asked)  # type: ignore[no-untyped-call]
        model.register_load_state_dict_pre_hook(self._given)  # type: ignore[no-untyped-call]
        self._leave()

    @contextmanager
    def away(self) -> Iterator[None]:
        """The weights themselves are in the model."""
        self._check()
        for seat in self._seats:
            seat.module._parameters[seat.attribute] = seat.weight
        self._inside = True
        try:
            yield
        finally:
            self._inside = False
            self._leave()

    def _leave(self) -> None:
        for seat in self._seats:
            seat.module._parameters[seat.attribute] = seat.stand_in

    def _count(self) -> int:
        return sum(len(module._parameters) + len(module._modules) for module in self._modules)

    def _check(self) -> None:
        if self._inside:
            raise RunError("engine.step or engine.evaluate was called by the model that it is running")
        for seat in self._seats:
            now = seat.module._parameters.get(seat.attribute)
            if now is not seat.stand_in:
                raise RunError(f"parameter {seat.name} was replaced or removed after Engine took the model over; {ANEW}")
            if now._version != seat.version:
                raise RunError(
                    f"{seat.name} was changed in place between steps: only stand-ins are in the model then, so nothing came "
                    "of it; take engine.state_dict(), change that, and give it to a new Engine(new_model, weights=...)"
                )
            if now.requires_grad != seat.weight.requires_grad:
                raise RunError(
                    f"requires_grad of {seat.name} is {now.requires_grad}, it was {seat.weight.requires_grad} when Engine took "
                    f"the model over, and what is trained has its place by that; {ANEW}"
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
        raise RunError("model.state_dict(): the weights live in the engine; use engine.state_dict(), or engine.save(folder)")

    def _given(self, module: nn.Module, *rest: Any) -> None:
        raise RunError(
            "model.load_state_dict(...): the weights live in the engine; give Engine(model, weights=...) the state dict, "
            "or use engine.load(folder)"
        )
