"""Finds the module path and the source line of a call."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from torch import fx, nn

from scrimp.capture.torch_private.dynamo import Frame, line_of, modules_of


class Places:
    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.names = {id(module): name for name, module in model.named_modules()}

    def of(self, node: fx.Node) -> str:
        """The location of a node, or of the next node that has one."""
        while not node.meta.get("stack_trace") and node.next.op != "root":
            node = node.next
        return f"{named(self.path(node) or '')}, {line_of(node.meta.get('stack_trace'))}"

    def path(self, node: fx.Node) -> str | None:
        """The path of the module that made a node. A module with several uses (an activation) has the path of its first use,
        wherever it is called, so it is left out."""
        found: str | None = None
        for number in modules_of(node):
            path = self.names.get(number)
            if path is not None and (not found or path == found or path.startswith(f"{found}.")):
                found = path
        return found

    def paths(self, nodes: Sequence[fx.Node]) -> list[str]:
        """Nodes without a known module get the path of the one before."""
        paths: list[str] = []
        for node in nodes:
            known = self.path(node)
            paths.append(known if known is not None else paths[-1] if paths else "")
        return paths

    def at(self, frames: Sequence[Frame]) -> str:
        """The first module whose forward holds the innermost line that any does, because errors occur at the first; and the
        line."""
        line = str(frames[-1]) if frames else "?"
        for frame in reversed(frames):
            for path, module in self.model.named_modules():
                if _holds(inspect.unwrap(type(module).forward), frame):
                    return f"{named(path)}, {line}"
        return f"{named('')}, {line}"


def named(path: str) -> str:
    return path or "the model"


def _holds(function: Any, frame: Frame) -> bool:
    code = getattr(function, "__code__", None)
    if code is None or code.co_filename != frame.file:
        return False
    lines = [line for _, _, line in code.co_lines() if line is not None]
    return bool(min(lines) <= frame.line <= max(lines))
