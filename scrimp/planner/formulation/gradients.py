"""Holds the gradients that a part's layers give to the layers before them.

The part's last layer is modelled. It gets the gradients of its outputs from other parts, the layers before it get them from their
own part, and the first layer gives its gradients to other parts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from scrimp.planner.formulation.builder import TEMPORARIES, Numbers
from scrimp.planner.shard.layer_runs import Part

if TYPE_CHECKING:
    from scrimp.planner.formulation.assembly import Assembly


def draw_gradients(problem: Assembly, k: int, part: Part) -> None:
    """Of the inputs of a part's layers."""
    _given(problem, k, part)
    if part.count > 1 and not problem.alone:
        _inside(problem, k, part)


def _given(problem: Assembly, k: int, part: Part) -> None:
    """Until their last use in the layer, or the part, that gets them."""
    model = part.model
    ends = [dict(zip(model.borders, problem.graph.layers[layer].inputs, strict=True)) for layer in (part.first, part.last)]
    for name, gradient in model.graph.gradients:
        root = model.values[gradient].storage
        if root not in model.lives:
            continue
        first, last = (part.point(op) for op in model.lives[root])
        if name not in ends[0]:
            last += 1  # while it is reduced
        for source in (each[name] for each in ends if name in each):
            if source.layer is not None and problem.part_of[source.layer] != k:
                before = problem.parts[problem.part_of[source.layer]]
                last = max([last, *(before.point(span[1]) for span in _spans(before, source.name))])
        problem.hold(k, root, first, last)


def _inside(problem: Assembly, k: int, part: Part) -> None:
    """Adds the bytes by which a gradient from the part itself is larger than one from another part."""
    for output in part.model.graph.outputs:
        spans = _spans(part, output)
        makers = {reader.part: _maker(problem, reader.part, k, output) for reader in problem.readers(k, output)}
        inner = makers.pop(k, None)
        if inner is None or not spans:
            continue
        node, mine = inner
        first, last = part.again(0) - 1, max(part.point(span[1]) for span in spans)
        outer = next((each for each in makers.values() if each is not None), None)
        if outer is None:
            problem.sketch.hold(node, first, last, TEMPORARIES, mine)
        else:
            more = np.maximum(mine[:, None] - outer[1][None, :], 0)
            problem.sketch.pair_hold(node, outer[0], first, last, TEMPORARIES, more)


def _maker(problem: Assembly, reading: int, k: int, output: str) -> tuple[int, Numbers] | None:
    """The node that makes the gradient of an output in a part that reads it, and its bytes by option."""
    model = problem.parts[reading].model
    gradient = dict(model.graph.gradients).get(problem.input_name(reading, k, output))
    if gradient is None or gradient not in model.makers:
        return None
    group = model.makers[gradient]
    return problem.nodes[reading, group], problem.ways[reading, group].repeat(problem.nbytes(model, group, gradient))


def _spans(part: Part, output: str) -> list[tuple[int, int]]:
    """From which operator to which the gradient of an output is used."""
    tangent = dict(part.model.graph.tangents).get(output, "")
    return [span for use in part.model.uses.get(tangent, ()) for span in use.spans]
