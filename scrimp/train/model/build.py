"""Builds a model that the user names: on meta, with a batch for it where a command plans; to train where a run begins."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from torch import nn

from scrimp import zoo
from scrimp.errors import ScrimpError
from scrimp.train.model.names import FOLDER, FUNCTION, check_model, kind_of
from scrimp.train.set_pairs import pairs
from scrimp.zoo import configs, example_on_meta

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
    model = _zoo(name, given, settings)
    try:
        return model, example_on_meta(name, batch, **given)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ScrimpError(f"{name} cannot be built{_with(settings)}: {_line(error)}") from error


def _zoo(name: str, given: Mapping[str, Any], settings: Sequence[str]) -> nn.Module:
    try:
        with torch.device("meta"):
            return zoo.build(name, **given)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ScrimpError(f"{name} cannot be built{_with(settings)}: {_line(error)}") from error


@dataclass(frozen=True, kw_only=True)
class Built:
    """A model to train. `seq`, `vocab`: tokens of a sequence and of its vocabulary, None where unknown. `shifted`: it takes
    (inputs, targets); otherwise {input_ids, labels}. `reads`: whether it reads text at all."""

    model: nn.Module
    seq: int | None
    vocab: int | None
    shifted: bool
    reads: bool = True


def model_to_train(name: str, settings: Mapping[str, Any]) -> Built:
    """On meta, unless a function makes it."""
    texts = [f"{key}={_as_text(value)}" for key, value in settings.items()]
    check_model(name, None, None, texts)
    kind = kind_of(name)
    if kind == FUNCTION:
        made = called(name, "that returns a model")
        model = made[0] if isinstance(made, tuple) and made else made
        if not isinstance(model, nn.Module):
            raise ScrimpError(f"{name}() must return a model, or a model and its batch, not {type(made).__name__}")
        shifted = "labels" not in inspect.signature(model.forward).parameters
        return Built(model=model, seq=None, vocab=None, shifted=shifted)
    if kind == FOLDER:
        model = _causal(Path(name), texts, "[model.settings] ")
        vocab = getattr(getattr(model, "config", None), "vocab_size", None)
        return Built(model=model, seq=None, vocab=vocab, shifted=False)
    given = configs.read(name, dict(pairs(texts, "layers=32")))
    config = zoo.config(name, **given)
    reads = isinstance(config, (zoo.GPTConfig, zoo.LlamaConfig, zoo.MoEConfig))
    return Built(
        model=_zoo(name, given, texts), seq=getattr(config, "seq", None), vocab=getattr(config, "vocab", None), shifted=True,
        reads=reads,
    )  # fmt: skip


def _as_text(value: Any) -> str:
    """As --set writes it."""
    if isinstance(value, (list, tuple)):
        return ("/" if value and isinstance(value[0], (list, tuple)) else ",").join(map(_as_text, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def _with(settings: Sequence[str]) -> str:
    return f" with {', '.join(settings)}" if settings else ""


def _line(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__


def _hugging_face(folder: Path, batch: int, seq: int, settings: Sequence[str]) -> tuple[nn.Module, Batch]:
    model = _causal(folder, settings, "--set ")
    try:
        tokens = torch.zeros(batch, seq, dtype=torch.int64, device="meta")
    except RuntimeError as error:
        raise ScrimpError(f"a batch of {batch} sequences of {seq} tokens is too large: {_line(error)}") from error
    return model, {"input_ids": tokens, "labels": tokens.clone()}


def _causal(folder: Path, settings: Sequence[str], said: str) -> nn.Module:
    """A causal language model of a config.json, on meta. `said`: where the user wrote the settings, for errors."""
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(folder)
    except Exception as error:  # transformers raises many kinds of errors
        raise ScrimpError(f"{folder}: {_line(error)}") from error
    for name, text in pairs(settings, "num_hidden_layers=32"):
        if not hasattr(config, name):
            near = get_close_matches(name, [each for each in config.to_dict() if not each.startswith("_")], 3)
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            raise ScrimpError(f"{said}{name}={text}: the config in {folder} has no {name}{hint}")
        setattr(config, name, _like(f"{said}{name}={text}", name, text.strip(), getattr(config, name)))
    config.use_cache = False
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config)  # type: ignore[no-any-return, no-untyped-call]
    except Exception as error:
        raise ScrimpError(f"{folder}: its config builds no causal language model{_with(settings)}: {_line(error)}") from error


def _like(said: str, name: str, text: str, now: Any) -> Any:
    """Parses a text as a value of the config's type. A size of 1 or more must stay so."""
    if isinstance(now, bool):
        if text.lower() in ("true", "false"):
            return text.lower() == "true"
        raise ScrimpError(f"{said}: it is true or false; the config has {str(now).lower()}")
    if isinstance(now, int):
        least = 1 if now >= 1 and not name.endswith("_id") else -LARGEST
        if re.fullmatch(r"-?[0-9]{1,10}", text) and least <= int(text) <= LARGEST:
            return int(text)
        span = f"from 1 to {LARGEST:,}" if least == 1 else f"of at most {LARGEST:,}"
        raise ScrimpError(f"{said}: it is a whole number {span}; the config has {now}")
    try:
        read = ast.literal_eval(text)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        read = text
    if isinstance(now, float) and (isinstance(read, bool) or not isinstance(read, (int, float))):
        raise ScrimpError(f"{said}: it is a number; the config has {now}")
    return text if isinstance(now, str) else read


def _by_function(name: str) -> tuple[nn.Module, Batch]:
    made = called(name, "that returns a model and its batch")
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module)):
        raise ScrimpError(f"{name}() must return a model and its batch, not {type(made).__name__}")
    return made


def called(name: str, what: str) -> Any:
    """What a user's function, module:function, returns. `what`: that the function should do, for errors."""
    found = function_of(name, what)
    try:
        return found()
    except Exception as error:  # a user's function can raise anything
        raise ScrimpError(f"{name}() failed: {type(error).__name__}: {error}") from error


def function_of(name: str, what: str) -> Callable[..., Any]:
    """The function that module:function names, of this folder or of an installed package."""
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
        raise ScrimpError(f"{name} is a {type(found).__name__}, not a function {what}")
    return found  # type: ignore[no-any-return]
