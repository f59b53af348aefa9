"""Pairs each forward operator with the backward operators that autograd made of it.

Autograd numbers the forward operators that it records, and each backward operator carries the number of its origin. An operator
that is not recorded, and the sums and casts of gradients that autograd makes itself, carry the number of the operator last
recorded. So only the first forward operator with a number owns it; and in the backward, where numbers fall, a number higher than
one before it is stale.

An operator with a stale number belongs to the operator whose output's gradient it makes. That is the one its reader comes from;
or, where the gradient passes through operators whose backward does nothing (a sum), the one at whose output the paths meet.
"""

from __future__ import annotations

from operator import getitem

from torch import Tensor, fx

from scrimp.capture.torch_private.joint import is_backward, sequence_number


def owners(graph: fx.Graph) -> dict[fx.Node, int]:
    """The autograd number of each node that owns one or comes from its owner. Call it before nodes are removed."""
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
        else:  # a sum of three gradients is two additions
            made[node] = made[readers[0]]
    return made


def _meeting(source: fx.Node, gradient: fx.Node, loud: set[fx.Node]) -> fx.Node:
    """Follows an operator's output as long as a single reader passes the gradient on unchanged, and keeps its shape."""
    while True:
        readers = [reader for reader in _readers(source) if not is_backward(reader) and reader.op == "call_function"]
        if len(readers) != 1 or readers[0] in loud or not _same_shape(readers[0], gradient):
            return source
        source = readers[0]


def _same_shape(one: fx.Node, two: fx.Node) -> bool:
    left, right = one.meta.get("val"), two.meta.get("val")
    return isinstance(left, Tensor) and isinstance(right, Tensor) and left.shape == right.shape


def _readers(node: fx.Node) -> list[fx.Node]:
    """The nodes that read it or a part of it."""
    parts = [user for user in node.users if user.target is getitem]
    return [reader for reader in (*node.users, *(user for part in parts for user in part.users)) if reader.target is not getitem]
