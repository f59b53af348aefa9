"""Which operators belong together: one of the forward, and those that autograd made of it.

Autograd numbers the operators of the forward that it records, and tells for each of the backward from which it comes. An
operator that it does not record, and the sums and casts of gradients that it makes itself, carry the number of the operator
last recorded. So of the forward only the first with a number owns it; and in the backward, which runs from high to low, a
number higher than one before it is left over.

What is left over goes to the operator whose output's gradient it makes. That is the one that its reader comes from; or,
where the gradient passes through operators whose backward is to do nothing (a sum), the one at whose output paths meet.
"""

from __future__ import annotations

from operator import getitem

from torch import Tensor, fx

from scrimp.capture.torch_private.joint import is_backward, sequence_number


def owners(graph: fx.Graph) -> dict[fx.Node, int]:
    """Of the nodes that own a number, or come from its owner, that number. To be asked before nodes are taken out."""
    found: dict[fx.Node, int] = {}
    taken: set[int] = set()
    lowest: int | None = None
    for node in graph.nodes:
        number = sequence_number(node)
        if node.op != "call_function" or node.target is getitem or number is None:
            continue
        if not is_backward(node):
            if number not in taken:
                taken.add(number)
                found[node] = number
        elif lowest is None or number <= lowest:
            lowest = number
            found[node] = number
    return found


def cells(ops: list[fx.Node], owned: dict[fx.Node, int]) -> dict[fx.Node, int]:
    """A cell for each operator, numbered from 0 without gaps."""
    forward = [node for node in ops if not is_backward(node)]
    backward = [node for node in ops if is_backward(node)]
    made = {node: k for k, node in enumerate(forward)}
    by_number = {owned[node]: node for node in forward if node in owned}
    origin = {node: by_number[owned[node]] for node in backward if owned.get(node) in by_number}
    loud = set(origin.values())
    count = len(made)
    for node in reversed(backward):
        if node in origin:
            made[node] = made[origin[node]]
            continue
        readers = [reader for reader in _readers(node) if reader in made]
        if not readers:
            made[node], count = count, count + 1
        elif readers[0] in origin:
            made[node] = made[_meeting(origin[readers[0]], node, loud)]
        else:  # a sum of three gradients is two sums
            made[node] = made[readers[0]]
    return made


def _meeting(source: fx.Node, gradient: fx.Node, loud: set[fx.Node]) -> fx.Node:
    """From an operator on, as long as just one other reads what it gives, hands the gradient on as it is, and keeps its shape."""
    while True:
        readers = [reader for reader in _readers(source) if not is_backward(reader) and reader.op == "call_function"]
        if len(readers) != 1 or readers[0] in loud or not _same_shape(readers[0], gradient):
            return source
        source = readers[0]


def _same_shape(one: fx.Node, two: fx.Node) -> bool:
    left, right = one.meta.get("val"), two.meta.get("val")
    return isinstance(left, Tensor) and isinstance(right, Tensor) and left.shape == right.shape


def _readers(node: fx.Node) -> list[fx.Node]:
    """Those that read it or a part of it."""
    parts = [user for user in node.users if user.target is getitem]
    return [reader for reader in (*node.users, *(user for part in parts for user in part.users)) if reader.target is not getitem]
