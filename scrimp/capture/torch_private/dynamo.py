"""The only module that uses Dynamo's private API: traces a module and its inputs to one graph of torch calls.

`tests/capture/torch_private/test_private.py` fails when that API changes.
"""

from __future__ import annotations

import logging
import os
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch._dynamo as dynamo
from torch import Tensor, fx, nn
from torch._dynamo import trace_rules
from torch._dynamo.exc import TorchDynamoException
from torch._dynamo.functional_export import dynamo_graph_capture_for_export

_TORCH = os.path.join(os.path.dirname(torch.__file__), "")
_HERE = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")
_LEVELS = ("debug", "info", "warning", "error", "critical", "exception", "log")
# Torch 2.11 cannot sort the set of ignored functions, and logs that at every capture; fake tensors log a trace of every failure,
# which is reported as an error anyhow.
_NOISY = ("torch._dynamo.utils", "torch._subclasses.fake_tensor")


@dataclass(frozen=True, kw_only=True)
class Frame:
    """A line of the user's code."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{_short(self.file)}:{self.line}"


class Refused(Exception):  # noqa: N818  # never leaves the package
    """Dynamo cannot trace it into one graph. `frames`: the source lines, outermost first."""

    def __init__(self, reason: str, frames: Sequence[Frame]) -> None:
        super().__init__(reason)
        self.reason = reason
        self.frames = frames


def trace(module: nn.Module, inputs: Sequence[Any]) -> tuple[fx.GraphModule, list[Tensor], list[str]]:
    """The graph; for each of its placeholders the tensor of the module or of the inputs behind it; and which attributes of the
    module its forward sets, which a graph does not."""
    # Other libraries add methods to loggers: `warning_once`.
    ignored = {value for name, value in vars(logging.Logger).items() if name in _LEVELS or name.endswith("_once")}
    settings = {"ignore_logging_functions": ignored, "automatic_dynamic_shapes": False, "assume_static_by_default": True}
    try:
        with quiet(), dynamo.config.patch(settings), warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            captured = dynamo_graph_capture_for_export(module)(*inputs)
    except TorchDynamoException as error:
        raise Refused(_reason(error), _frames(error)) from error
    told = " ".join(str(each.message) for each in said if "side effects" in str(each.message))
    told = re.sub(r"\._modules\['(\w+)'\]", r".\1", told)
    effects = {each.lstrip(".") for each in re.findall(r"L\['self'\]((?:\.\w+|\[[^\]]*\])+)", told)}
    return captured, list(captured.graph._codegen.process_inputs(*inputs)), sorted(effects)


@contextmanager
def quiet() -> Iterator[None]:
    """Silences torch's logs of problems that are reported otherwise."""
    before = {name: logging.getLogger(name).level for name in _NOISY}
    for name in _NOISY:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)


def learn_torch() -> None:
    """Makes Dynamo build its table of torch's functions, which it does once, at the first trace, from what their names refer to
    then. It must do so before any of them is replaced."""
    trace_rules.get_torch_obj_rule_map()


def modules_of(node: fx.Node) -> tuple[int, ...]:
    """The ids of the modules whose forward made a node, outermost first."""
    return _ids(node.meta.get("nn_module_stack") or {})


def line_of(stack_trace: str | None) -> str:
    """ "zoo/gpt.py:77": the innermost line of a stack as text, without the folders above the file's own. It skips lines of torch
    itself except for its modules: they tell how a call got there, not what was called."""
    files = [
        line.strip().removeprefix('File "') for line in (stack_trace or "").splitlines() if line.lstrip().startswith("File ")
    ]
    if not files:
        return "?"
    given = [line for line in files if not line.startswith(_HERE)]  # replacements of torch's own calls
    own = [line for line in given if not line.startswith(_TORCH) or line.startswith(os.path.join(_TORCH, "nn", ""))]
    name, _, rest = (own or files)[-1].partition('", line ')
    return f"{_short(name)}:{rest.partition(',')[0].strip()}"


def _ids(stack: Mapping[str, Any]) -> tuple[int, ...]:
    return tuple(int(key.partition("@")[0]) for key in stack if key.partition("@")[0].isdigit())


def _short(name: str) -> str:
    return "/".join(name.replace("\\", "/").split("/")[-2:])


def _reason(error: TorchDynamoException) -> str:
    """The kind of error, and its reason."""
    text = str(error).split("from user code")[0]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    told = [line.removeprefix("Explanation: ") for line in lines if line.startswith("Explanation:")]
    return ": ".join([*lines[:1], *told[:1]]) if lines else type(error).__name__


def _frames(error: TorchDynamoException) -> list[Frame]:
    stack = getattr(error, "real_stack", None) or []
    return [Frame(file=frame.filename, line=frame.lineno or 0) for frame in stack]


def storage_of(tensor: Tensor) -> int:
    """Tensors with the same number share storage."""
    return int(tensor.untyped_storage()._cdata)


def grad_switch(node: fx.Node) -> bool | None:
    """The grad mode that a node sets; None if it sets none."""
    return bool(node.args[0]) if node.target is torch._C._set_grad_enabled else None


def logs_use(node: fx.Node) -> bool:
    return node.target is torch._C._log_api_usage_once


def autocast_enters(node: fx.Node) -> bool | None:
    """Whether it enables autocast; None if the node does not enter autocast."""
    if node.target is not torch.amp.autocast_mode._enter_autocast:
        return None
    return bool(node.args[2]) if len(node.args) > 2 else True


def autocast_exits(node: fx.Node) -> bool:
    return node.target is torch.amp.autocast_mode._exit_autocast


def higher_order(node: fx.Node) -> str | None:
    """The name of a higher-order operator, which takes graphs; else None."""
    return str(node.target) if isinstance(node.target, torch._ops.HigherOrderOperator) else None


def depends_on_values(node: fx.Node) -> bool:
    """Whether the result, or its shape, depends on the data."""
    value = node.meta.get("example_value")
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return True
    return isinstance(value, Tensor) and not all(type(size) is int for size in value.shape)
