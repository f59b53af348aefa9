"""Builds MODEL of the command line: a model on meta and a batch for it."""

from __future__ import annotations

import ast
import importlib
import re
import sys
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from torch import nn

from scrimp import zoo
from scrimp.cli._plan_check import FOLDER, FUNCTION, kind_of
from scrimp.cli._set import pairs
from scrimp.errors import ScrimpError
from scrimp.zoo import configs, example_on_meta

NEAR = 6  # how many known names an error message suggests
LARGEST = 2**31 - 1

Batch = Sequence[Any] | Mapping[str, Any]


def model_and_batch(name: str, batch: int, seq: int, settings: Sequence[str]) -> tuple[nn.Module, Batch]:
    """`name`: a zoo name, a folder with a Hugging Face config.json, or module:function, whose function returns both."""
    kind = kind_of(name)
    if kind == FOLDER:
        return _hugging_face(Path(name), batch, seq, settings)
    if kind == FUNCTION:
        return _by_function(name)
    given = configs.read(name, dict(pairs(settings, "layers=32")))
    try:
        with torch.device("meta"):
            model = zoo.build(name, **given)
        return model, example_on_meta(name, batch, **given)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ScrimpError(f"{name} cannot be built{_with(settings)}: {_line(error)}") from error


def check_explained(model: nn.Module, names: Sequence[str]) -> None:
    """Before the search: each must be the name of a module or a weight."""
    known = [name for name, _ in model.named_modules() if name]
    known += [name for name, _ in model.named_parameters(remove_duplicate=False)]
    for name in names:
        if name in known:
            _check_runs(model, name)
            continue
        near = dict.fromkeys([*get_close_matches(name, known, NEAR, 0.6), *(each for each in known if name and name in each)])
        words = f"did you mean {', '.join([*near][:NEAR])}?" if near else f"there are {', '.join(known[:NEAR])}, ..."
        raise ScrimpError(f"--explain {name}: the model has no weight, module or layer '{name}'; {words}")


def _check_runs(model: nn.Module, name: str) -> None:
    """A list of layers is never called itself, so the plan has no choice for it."""
    held = dict(model.named_modules()).get(name)
    inside = any(part.isdigit() for part in name.split("."))
    if held is None or inside or type(held).forward is not nn.Module.forward:
        return
    members = [f"{name}.{each}" for each, _ in held.named_children()]
    if len(members) > 1:
        raise ScrimpError(f"--explain {name}: it is a list of {len(members)} modules; name one, {members[0]} to {members[-1]}")


def _with(settings: Sequence[str]) -> str:
    return f" with {', '.join(settings)}" if settings else ""


def _line(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__


def _hugging_face(folder: Path, batch: int, seq: int, settings: Sequence[str]) -> tuple[nn.Module, Batch]:
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(folder)
    except Exception as error:  # transformers raises many kinds of errors
        raise ScrimpError(f"{folder}: {_line(error)}") from error
    for name, text in pairs(settings, "num_hidden_layers=32"):
        if not hasattr(config, name):
            near = get_close_matches(name, [each for each in config.to_dict() if not each.startswith("_")], 3)
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            raise ScrimpError(f"--set {name}={text}: the config in {folder} has no {name}{hint}")
        setattr(config, name, _like(name, text.strip(), getattr(config, name)))
    config.use_cache = False
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    except Exception as error:
        raise ScrimpError(f"{folder}: its config builds no causal language model{_with(settings)}: {_line(error)}") from error
    try:
        tokens = torch.zeros(batch, seq, dtype=torch.int64, device="meta")
    except RuntimeError as error:
        raise ScrimpError(f"a batch of {batch} sequences of {seq} tokens is too large: {_line(error)}") from error
    return model, {"input_ids": tokens, "labels": tokens.clone()}


def _like(name: str, text: str, now: Any) -> Any:
    """Parses a text as a value of the config's type. A size of 1 or more must stay so."""
    if isinstance(now, bool):
        if text.lower() in ("true", "false"):
            return text.lower() == "true"
        raise ScrimpError(f"--set {name}={text}: it is true or false; the config has {str(now).lower()}")
    if isinstance(now, int):
        least = 1 if now >= 1 and not name.endswith("_id") else -LARGEST
        if re.fullmatch(r"-?[0-9]{1,10}", text) and least <= int(text) <= LARGEST:
            return int(text)
        span = f"from 1 to {LARGEST:,}" if least == 1 else f"of at most {LARGEST:,}"
        raise ScrimpError(f"--set {name}={text}: it is a whole number {span}; the config has {now}")
    try:
        read = ast.literal_eval(text)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        read = text
    if isinstance(now, float) and (isinstance(read, bool) or not isinstance(read, (int, float))):
        raise ScrimpError(f"--set {name}={text}: it is a number; the config has {now}")
    return text if isinstance(now, str) else read


def _by_function(name: str) -> tuple[nn.Module, Batch]:
    module, _, function = name.partition(":")
    sys.path.insert(0, "")
    try:
        found = getattr(importlib.import_module(module), function)
    except Exception as error:  # importing a module can raise anything
        raise ScrimpError(f"{name}: {type(error).__name__}: {error}") from error
    except SystemExit as error:
        raise ScrimpError(f"{name}: importing the module calls sys.exit({error.code!r})") from error
    finally:
        sys.path.remove("")
    if not callable(found):
        raise ScrimpError(f"{name} is a {type(found).__name__}, not a function that returns a model and its batch")
    try:
        made = found()
    except Exception as error:  # a user's function can raise anything
        raise ScrimpError(f"{name}() failed: {type(error).__name__}: {error}") from error
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module)):
        raise ScrimpError(f"{name}() must return a model and its batch, not {type(made).__name__}")
    return made
