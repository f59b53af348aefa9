"""Puts empty meta parameters into the model between steps, and weights during a step.

Between steps the weights are not on the device, and reading them there would crash the process. So the model has, in place of
each parameter, an object on meta with its shape and dtype and no values. Before a step begins, changes to the module tree that
the engine cannot follow raise an error.
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
class _Entry:
    """One name of one parameter in the module tree."""

    module: nn.Module
    attribute: str
    name: str
    weight: nn.Parameter
    empty: nn.Parameter
    references: list[Set]

    def put(self, parameter: nn.Parameter) -> None:
        self.module._parameters[self.attribute] = parameter
        for put in self.references:
            put(parameter)


class MetaParameters:
    """`weights` are the parameters that the engine trains, under every name they have."""

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
        self._full: dict[int, nn.Parameter] = {}  # by the id of the weight: full parameters that are in the model now
        self._modules = list(model.modules())
        self._size = self._count()
        self._entries = []
        for name, weight in weights.items():
            path, _, attribute = name.rpartition(".")
            empty = taken.meta_parameters[id(weight)]
            if empty.held is None or empty.held.weight is not weight:
                empty.held = Held(name=name, weight=weight, hooks=hooks, device=device)
            module = model.get_submodule(path)
            entry = _Entry(
                module=module,
                attribute=attribute,
                name=name,
                weight=weight,
                empty=empty,
                references=taken.references[id(weight)],
            )
            self._entries.append(entry)
        model.register_forward_pre_hook(self._called)
        model.register_state_dict_pre_hook(self._asked)  # type: ignore[no-untyped-call]
        model.register_load_state_dict_pre_hook(self._given)  # type: ignore[no-untyped-call]
        apply = model._apply

        def converted(fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
            for entry in self._entries:  # before any buffer is converted
                if not self._full and not self._inside and fn(entry.empty) is not entry.empty:
                    refuse(entry.empty, getattr(fn, "__name__", "apply"))  # type: ignore[arg-type]
            return apply(fn, recurse)  # type: ignore[no-any-return, no-untyped-call]

        model._apply = converted  # type: ignore[method-assign]
        self._leave()

    @contextmanager
    def away(self) -> Iterator[None]:
        """Inside, the weights themselves are in the model."""
        self._check()
        for entry in self._entries:
            entry.put(entry.weight)
        self._inside = True
        try:
            yield
        finally:
            self._inside = False
            self._leave()

    @contextmanager
    def full(self, parameters: Mapping[int, nn.Parameter]) -> Iterator[None]:
        """Inside, full parameters are in the model, by the id of their weights. At the end each must still be the same."""
        self._check()
        chosen = [(entry, parameters[id(entry.weight)]) for entry in self._entries if id(entry.weight) in parameters]
        for entry, parameter in chosen:
            entry.put(parameter)
        self._full = dict(parameters)
        try:
            yield
            for entry, parameter in chosen:
                _still(entry, parameter)
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
        for entry in self._entries:
            entry.put(entry.empty)

    def _count(self) -> int:
        return sum(len(module._parameters) + len(module._modules) for module in self._modules)

    def _check(self) -> None:
        self.check_closed()
        if self._inside:
            raise RunError("engine.step or engine.evaluate was called by the model that it is running")
        with torch._C.DisableTorchFunctionSubclass():
            for entry in self._entries:
                now = entry.module._parameters.get(entry.attribute)
                if now is not entry.empty:
                    raise RunError(f"parameter {entry.name} was replaced or removed after Engine adopted the model; {ANEW}")
                if now.requires_grad != entry.weight.requires_grad:
                    raise RunError(
                        f"requires_grad of {entry.name} is {now.requires_grad}, it was {entry.weight.requires_grad} when Engine "
                        f"adopted the model, and its memory was laid out by that; {ANEW}"
                    )
        if self._count() != self._size:
            raise RunError(f"modules or parameters were added to the model, or removed, after Engine adopted it; {ANEW}")

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


def _still(entry: _Entry, parameter: nn.Parameter) -> None:
    now = entry.module._parameters.get(entry.attribute)
    if now is not parameter:
        raise RunError(f"{entry.name} was replaced inside engine.full_parameters(); edit it in place: parameter.data.copy_(...)")
    want = (torch.float32, torch.device("cpu"), entry.weight.shape, entry.weight.requires_grad)
    got = (now.dtype, now.device, now.shape, now.requires_grad)
    if got != want:
        raise RunError(
            f"{entry.name} is {_words(got)} at the end of engine.full_parameters(), it was {_words(want)}; "
            "only values may be edited"
        )


def _words(what: tuple[torch.dtype, torch.device, torch.Size, bool]) -> str:
    dtype, device, shape, requires_grad = what
    return f"{dtype} of shape {tuple(shape)} on {device}, requires_grad={requires_grad}"
