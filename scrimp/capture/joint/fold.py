"""Removes nodes of a joint graph that equal another node: detach, views back and forth, multiplication by one."""

from __future__ import annotations

import torch
from torch import Tensor, fx

from scrimp.capture.torch_private.joint import is_view

aten = torch.ops.aten

_NAMES = {aten.detach.default, aten.alias.default, aten.lift_fresh.default, aten.lift_fresh_copy.default}  # never written to
_VIEWS = {aten.view.default, aten._unsafe_view.default}
_ZERO = {aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor, aten.sub.Scalar}
_ONE = {aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar, aten.pow.Tensor_Scalar}


def fold(graph: fx.Graph) -> None:
    """In place. Outputs stay, under the name of the remaining node; unused nodes are removed."""
    for node in list(graph.nodes):
        if node.op != "call_function" or not node.args or not isinstance(node.args[0], fx.Node):
            continue
        _shorten(node)
        same = _same(node)
        if same is not None:
            node.replace_all_uses_with(same)
            graph.erase_node(node)
    for node in reversed(list(graph.nodes)):
        if node.op in ("call_function", "get_attr") and not node.users:
            graph.erase_node(node)


def _shorten(node: fx.Node) -> None:
    """Turns a view of a view of a contiguous tensor into one view."""
    given = node.args[0]
    while node.target in _VIEWS and isinstance(given, fx.Node) and given.target in _VIEWS:
        base = given.args[0]
        if not isinstance(base, fx.Node) or not base.meta["val"].is_contiguous():
            return
        node.update_arg(0, base)
        given = base


def _same(node: fx.Node) -> fx.Node | None:
    """The node that this one equals, with the same storage."""
    given = node.args[0]
    assert isinstance(given, fx.Node)
    if node.target in _NAMES:
        return given
    made = node.meta.get("val")
    if not isinstance(made, Tensor):
        return None
    idle = 0 if node.target in _ZERO else 1 if node.target in _ONE else None
    if idle is not None and len(node.args) > 1 and type(node.args[1]) in (int, float) and node.args[1] == idle:
        return given if _alike(made, given.meta["val"]) and not node.kwargs else None
    while is_view(node.target):
        if isinstance(given.meta.get("val"), Tensor) and _alike(made, given.meta["val"]):
            offset = made.storage_offset() == given.meta["val"].storage_offset()
            return given if offset else None
        node, above = given, given.args[0] if given.args else None
        if not isinstance(above, fx.Node):
            return None
        given = above
    return None


def _alike(one: Tensor, two: Tensor) -> bool:
    return one.shape == two.shape and one.stride() == two.stride() and one.dtype == two.dtype
