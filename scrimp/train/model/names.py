"""Checks a model named by the user before torch is loaded: a name of the zoo, a folder with a config.json, or module:function."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path

from scrimp.errors import ScrimpError
from scrimp.train.model.importable import importable
from scrimp.train.set_pairs import pairs
from scrimp.zoo import configs

FOLDER, FUNCTION, ZOO = "folder", "function", "zoo"


def kind_of(model: str) -> str:
    if Path(model).is_dir():
        return FOLDER
    return FUNCTION if ":" in model else ZOO


def check_model(model: str, batch: int | None, seq: int | None, settings: Sequence[str]) -> None:
    texts = dict(pairs(settings, "layers=32"))
    kind = kind_of(model)
    if kind == FOLDER:
        _check_folder(Path(model))
    elif kind == FUNCTION:
        _check_function(model, batch, seq, settings)
    elif Path(model).exists() or "/" in model:
        where = f"give its folder, {Path(model).parent}" if Path(model).name == "config.json" else "give a folder"
        raise ScrimpError(f"{model} is not a folder: for a Hugging Face config.json {where}")
    else:
        if seq is not None and model in configs.PRESETS:
            raise ScrimpError(f"--seq {seq} is for a Hugging Face config.json: for {model} write --set seq={seq}, if it has one")
        try:
            configs.read(model, texts)
        except ScrimpError as error:
            other = "" if model in configs.PRESETS else "; or give a folder with a config.json, or module:function"
            raise ScrimpError(f"{error}{other}") from error


def _check_folder(folder: Path) -> None:
    file = folder / "config.json"
    try:
        config = json.loads(file.read_text())
    except FileNotFoundError:
        raise ScrimpError(f"{folder} has no config.json: give the folder of a Hugging Face model") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ScrimpError(f"{file} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ScrimpError(f"{file} is not a Hugging Face config: it holds a {type(config).__name__}, not an object")
    if importlib.util.find_spec("transformers") is None:
        raise ScrimpError(f"{folder} is a folder: to read a Hugging Face config, pip install transformers")


def _check_function(model: str, batch: int | None, seq: int | None, settings: Sequence[str]) -> None:
    module, _, function = model.partition(":")
    if not all(part.isidentifier() for part in (*module.split("."), function)):
        raise ScrimpError(f"{model}: write module:function, such as my_models:small_gpt")
    for name, given in (("--batch", batch), ("--seq", seq), ("--set", settings or None)):
        if given is not None:
            raise ScrimpError(f"{name} has no effect on {model}, whose function returns the model and its batch: leave it out")
    if not importable(module, model):
        raise ScrimpError(f"{model}: there is no module '{module}' in this folder or among the installed ones")
