"""Which operators belong together: one of the forward, and those that autograd made of it.

Autograd numbers the operators of the forward that it records, and tells for each of the backward from which it comes. An
operator that it does not record, and the sums and casts of gradients that it makes itself, carry the number of the operator
last recorded. So of the forward only the first with a number owns it; and in the backward, which runs from high to low, a
number higher than one before it is left over. What is left over goes to the operator whose output's gradient it makes: the
one that its reader belongs to.
"""

from __future__ import annotations

from operator import getitem

from torch import fx

from scrimp.capture._joint_private import is_backward, sequence_number


def owners(graph: fx.Graph) -> dict[fx.Node, int]:
    """Of the nodes that own a number, or come from its owner, that number. To be asked before nodes are taken out."""
    found: dict[fx.Node, int] = {}
    taken: set[int] = set()
    lowest: int | None = None
    for node in _calls(graph):
        number = sequence_number(node)
        if number is None:
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
    made: dict[fx.Node, int] = {}
    by_number: dict[int, int] = {}
    for node in ops:
        if not is_backward(node):
            made[node] = len(made)
            if node in owned:
                by_number[owned[node]] = made[node]
    count = len(made)
    for node in reversed(ops):
        if is_backward(node):
            known = by_number.get(owned.get(node, -1))
            if known is None:
                known = next((made[user] for user in _readers(node) if user in made), None)
            if known is None:
                known, count = count, count + 1
            made[node] = known
    return made


def _readers(node: fx.Node) -> list[fx.Node]:
    """Operators that read it, or a part of it."""
    direct = list(node.users)
    return [*direct, *(user for part in direct for user in part.users if part.target is getitem)]


def _calls(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "call_function" and node.target is not getitem]
