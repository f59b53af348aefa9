"""What MODEL on the command line stands for: a model on meta and a batch for it."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from scrimp import zoo
from scrimp.cli._set import pairs
from scrimp.errors import ScrimpError

_FRACTION = re.compile(r"\d*\.\d+")  # such as dropout=0.1

Batch = Sequence[Any] | Mapping[str, Any]


def model_and_batch(name: str, batch: int, seq: int, settings: Sequence[str]) -> tuple[nn.Module, Batch]:
    """A zoo name, a folder with a Hugging Face config.json, or module:function, whose function gives both."""
    if Path(name).is_dir():
        return _hugging_face(Path(name), batch, seq, settings)
    if ":" in name:
        return _by_function(name)
    given = _settings(settings)
    try:
        zoo.config(name, **given)
    except (KeyError, TypeError, ValueError) as error:
        raise ScrimpError(f"{name}: {error}; or give a folder with a config.json, or module:function") from error
    try:
        with torch.device("meta"):
            model = zoo.build(name, **given)
        return model, zoo.example_batch(name, batch, **given)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ScrimpError(f"{name} cannot be built with {', '.join(settings)}: {error}") from error


def _settings(settings: Sequence[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs(settings, "layers=32"):
        found[name] = int(value) if value.isdigit() else float(value) if _FRACTION.fullmatch(value) else value
    return found


def _hugging_face(folder: Path, batch: int, seq: int, settings: Sequence[str]) -> tuple[nn.Module, Batch]:
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise ScrimpError(f"{folder} is a folder: to read a Hugging Face config, pip install transformers") from error
    try:
        config = AutoConfig.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise ScrimpError(f"{folder}: {str(error).splitlines()[0]}") from error
    for name, value in _settings(settings).items():
        if not hasattr(config, name):
            raise ScrimpError(f"--set {name}={value}: the config in {folder} has no {name}")
        setattr(config, name, value)
    config.use_cache = False
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    except (ValueError, TypeError) as error:
        raise ScrimpError(f"{folder}: no causal language model can be made of it: {str(error).partition(chr(10))[0]}") from error
    tokens = torch.zeros(batch, seq, dtype=torch.int64)
    return model, {"input_ids": tokens, "labels": tokens.clone()}


def _by_function(name: str) -> tuple[nn.Module, Batch]:
    module, _, function = name.partition(":")
    sys.path.insert(0, "")
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ScrimpError(f"{name}: {error}") from error
    finally:
        sys.path.pop(0)
    try:
        made = found()
    except Exception as error:  # of as many kinds as there are functions
        raise ScrimpError(f"{name}() failed: {type(error).__name__}: {error}") from error
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module)):
        raise ScrimpError(f"{name}() must give a model and its batch, and gave {type(made).__name__}")
    return made
