"""Methods of a model that work between steps, because they run inside its engine: `generate`, and `save_pretrained`.

Between steps the model holds no weights. Callbacks and scripts call these methods on the model itself, so the door replaces them
on this one object. Inside the engine they are the model's own.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from scrimp.engine import Engine
from scrimp.errors import RunError

if TYPE_CHECKING:
    from scrimp.ext.hf.within_budget import WithinBudget


def evaluate_as_it_is(engine: Engine, model: nn.Module, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """As `engine.evaluate(function, ...)`, with every module in the mode it is in: plain PyTorch does not change it either."""
    training = [module for module in model.modules() if module.training]

    def run(*args: Any, **kwargs: Any) -> Any:
        with _modes(training):
            return function(*args, **kwargs)

    return engine.evaluate(run, *args, **kwargs)


@contextmanager
def _modes(training: list[nn.Module]) -> Iterator[None]:
    for module in training:
        module.training = True
    yield


def route(model: nn.Module, trainer: WithinBudget) -> None:
    """Let the methods of this model run inside the trainer's engine."""
    ref = weakref.ref(trainer)
    for method, inside in (("generate", _generate), ("save_pretrained", _save_pretrained)):
        own = getattr(model, method, None)
        if callable(own):
            setattr(model, method, inside(own, ref))


def _generate(own: Callable[..., Any], ref: weakref.ref[WithinBudget]) -> Callable[..., Any]:
    @functools.wraps(own)
    def generate(*args: Any, **kwargs: Any) -> Any:
        trainer = ref()
        if trainer is None or trainer.inside:
            return own(*args, **kwargs)
        return trainer.run_inside(own, *args, **kwargs)

    return generate


def _save_pretrained(own: Callable[..., Any], ref: weakref.ref[WithinBudget]) -> Callable[..., Any]:
    @functools.wraps(own)
    def save_pretrained(*args: Any, state_dict: Any = None, **kwargs: Any) -> Any:
        trainer = ref()
        if trainer is not None and state_dict is None:
            if trainer.args.world_size > 1:
                raise RunError("model.save_pretrained on one of several ranks: call trainer.save_model(folder) on every rank")
            state_dict = trainer.whole_state()
        out = own(*args, state_dict=state_dict, **kwargs)
        if trainer is not None and trainer.args.should_save and not is_peft(trainer.model):
            _keep_dtype(trainer.model, trainer.dtype, *args, **kwargs)
        return out

    return save_pretrained


def _keep_dtype(model: Any, dtype: torch.dtype, save_directory: str | Path, *_args: Any, **_kwargs: Any) -> None:
    """Write the configuration with the dtype of the saved weights: transformers writes that of the weights on the device."""
    name = str(dtype).removeprefix("torch.")
    if str(model.config.dtype).removeprefix("torch.") != name:
        model.config.dtype = name
        model.config.save_pretrained(save_directory)


def names_to_save(model: nn.Module) -> list[str]:
    """Of a PEFT model: what its `save_pretrained` may need, which is what is trained, and the embeddings. Else none, for all."""
    if not is_peft(model):
        return []
    embeddings = {id(parameter) for module in _embeddings(model) for parameter in module.parameters()}
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad or id(parameter) in embeddings]


def is_peft(model: nn.Module) -> bool:
    """Whether `save_pretrained` writes adapters only."""
    return bool(getattr(model, "peft_config", None))


def _embeddings(model: nn.Module) -> Iterator[nn.Module]:
    for method in ("get_input_embeddings", "get_output_embeddings"):
        found = getattr(model, method, lambda: None)()
        if isinstance(found, nn.Module):
            yield found


def aliases(model: nn.Module) -> dict[str, str]:
    """Other names of tied parameters, each with the first name of the same parameter."""
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        name: first[id(parameter)]
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if name != first[id(parameter)]
    }


def dtypes_of(model: nn.Module) -> dict[str, torch.dtype]:
    """By name: in which dtype the model was loaded, so that it is saved in the same."""
    return {name: parameter.dtype for name, parameter in model.named_parameters()}
