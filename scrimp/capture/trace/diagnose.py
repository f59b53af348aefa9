"""Diagnoses a failed trace: runs the forward once more, call by call, on fake tensors, to see whether it fails by itself."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn

from scrimp.capture.torch_private.dynamo import Frame, quiet
from scrimp.capture.torch_private.joint import DATA_DEPENDENT, FakeTensorMode
from scrimp.capture.trace.source_location import named

_TORCH, _HERE = str(Path(torch.__file__).parent), str(Path(__file__).parents[1])


def failure(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], mode: FakeTensorMode) -> str | None:
    """The place and text of the error; None if it does not fail, or only because fake tensors have no data."""
    try:
        inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError as error:
        takes = ", ".join(inspect.signature(model.forward).parameters) or "nothing"
        return f"{type(model).__name__}.forward takes {takes}, and not this batch ({error})"
    entered: list[str] = []  # the modules that were entered and not left
    try:
        with ExitStack() as hooks, mode, torch.enable_grad(), quiet():
            for path, module in model.named_modules():
                enter = module.register_forward_pre_hook(lambda *_, path=path: entered.append(path))
                leave = module.register_forward_hook(lambda *_: entered.pop() and None)
                hooks.callback(enter.remove)
                hooks.callback(leave.remove)
            model(*args, **kwargs)
    except DATA_DEPENDENT:
        return None
    except Exception as error:  # models raise many kinds of errors
        words = str(error).partition("\n")[0] or type(error).__name__
        if "fake" in words.lower():
            return None
        return f"{named(entered[-1] if entered else '')}, {_line(error)}: the forward fails on this batch ({words})"
    return None


def _line(error: Exception) -> str:
    """The innermost line of the user's code."""
    frames = [each for each in traceback.extract_tb(error.__traceback__) if not each.filename.startswith((_TORCH, _HERE))]
    return str(Frame(file=frames[-1].filename, line=frames[-1].lineno or 0)) if frames else "?"
