"""Weights in the planner's problem: one node for the weights of each group chooses their ZeRO levels at rest.

Weights are gathered for the forward and for the backward of every micro-batch, and once more for a recompute. Gradients are
reduced, and weights updated, once in a step; or, where sharded gradients accumulate over micro-batches, reduced with each of
them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from scrimp._arguments import RECOMPUTE
from scrimp.layout import Mesh
from scrimp.move import ITEMSIZE
from scrimp.planner.cost.zero_levels import GRADIENTS as GRADIENT_AXES
from scrimp.planner.cost.zero_levels import STATES, AtRest, Used, at_rest, axes_at_rest, levels
from scrimp.planner.formulation.builder import (
    BACKWARD,
    BUFFERS,
    FORWARD,
    GRADIENTS,
    MOVED,
    ONCE,
    OPTIMIZER,
    PARAMETERS,
    SCRATCH,
    Numbers,
)  # fmt: skip
from scrimp.planner.shard.layer_runs import Part
from scrimp.planner.shard.options import Option
from scrimp.planner.shard.placement import Placed

if TYPE_CHECKING:
    from scrimp.planner.formulation.assembly import Assembly


def draw_weights(problem: Assembly, k: int, part: Part) -> None:
    model, sketch, mesh = part.model, problem.sketch, problem.moves.mesh
    gradients = dict(model.graph.gradients)
    by_group: dict[int, list[str]] = {}
    named = dict(problem.graph.layers[part.first].parameters)
    for name in model.weights:
        if named[name] in problem.outside.held:
            problem.borrowed.append((named[name], k, name))
            continue
        owner = problem.owners.setdefault(named[name], (k, name))
        if owner == (k, name):
            by_group.setdefault(model.uses[name][0].group, []).append(name)
        else:
            _tied(problem, *owner, k, name)
    choices = levels(mesh, problem.precision)
    for group, names in by_group.items():
        elements = part.count * sum(prod(model.values[name].shape) for name in names)
        trained = part.count * sum(prod(model.values[name].shape) for name in names if name in gradients)
        for span in sketch.always:
            sketch.must_be(*span, PARAMETERS, elements * problem.precision.weight)
            sketch.must_be(*span, GRADIENTS, trained * problem.precision.gradient)
            sketch.must_be(*span, OPTIMIZER, trained * problem.precision.states)
        if problem.alone:
            level = max(choices, key=sum)  # shards as much as possible
            least = [_at_rest(problem, option, names, gradients, level) for option in model.options[group]]
            for kind, of in _KINDS.items():
                nbytes = part.count * np.array([int(of(each)) for each in problem.ways[k, group].spread(least)])
                sketch.hold(problem.nodes[k, group], *sketch.always[0], kind, nbytes)
            continue
        path = problem.graph.layers[part.first].path
        node = sketch.node(f"{path}/{model.groups[group].name}/weights", [_level_words(mesh, c) for c in choices])
        problem.rest[k, group] = node
        here = problem.ways[k, group]
        found = here.spread(
            [[_at_rest(problem, option, names, gradients, level) for level in choices] for option in model.options[group]]
        )
        pair = (problem.nodes[k, group], node)

        def numbers(of: Callable[[AtRest], float], found: list[list[AtRest]] = found) -> Numbers:
            return np.array([[of(each) for each in row] for row in found])

        again = here.mask(RECOMPUTE, len(model.options[group]))[:, None]
        gather = part.count * numbers(lambda each: each.gather_seconds)
        sketch.pair_cost(*pair, gather, FORWARD)
        sketch.pair_cost(*pair, gather * (again + bool(trained)), BACKWARD)
        sketch.pair_cost(*pair, part.count * numbers(lambda each: each.reduce_seconds), BACKWARD)
        sketch.pair_cost(*pair, part.count * numbers(lambda each: each.seconds), ONCE)
        if any(named[name] in problem.outside.shared for name in names) and problem.precision.states:
            rate = problem.precision.reduced / problem.precision.states
            nbytes = rate * numbers(lambda each: each.state_nbytes)
            sketch.pair_cost(*pair, problem.outside.shared_seconds(nbytes), ONCE)
        for span in sketch.always:
            for kind, of in _KINDS.items():
                sketch.pair_hold(*pair, *span, kind, part.count * numbers(of).astype(np.int64))
        for name in names:
            if name in gradients:
                _reduced(problem, k, group, name, gradients[name], pair, choices)
        spans = [span for name in names for use in model.uses[name] if use.group == group for span in use.spans]
        for backward in (False, True):
            used = [span for span in spans if (span[0] >= model.forward_ops) == backward]
            if used:
                first, last = min(s[0] for s in used), max(s[1] for s in used)
                gathered = numbers(lambda each: each.gathered_nbytes).astype(np.int64)
                sketch.pair_hold(*pair, part.point(first) - 1, part.point(last), MOVED, gathered)
                if not backward:
                    sketch.pair_hold(*pair, part.again(first) - 1, part.again(last), MOVED, gathered * again)


def draw_buffers(problem: Assembly) -> None:
    """Every device of every stage holds all of the model's buffers, whole, during the whole step. The first node carries them:
    they are the same for all its options."""
    found = [parameter for parameter in problem.graph.parameters if parameter.buffer]
    nbytes = sum(prod(buffer.shape) * ITEMSIZE[buffer.dtype] for buffer in found)
    if not nbytes or not problem.outside.first:
        return
    sketch = problem.sketch
    for span in sketch.always:
        sketch.hold(0, *span, BUFFERS, np.full(len(sketch.nodes[0].options), nbytes))
        sketch.must_be(*span, BUFFERS, nbytes)


def _reduced(
    problem: Assembly, k: int, group: int, name: str, gradient: str, pair: tuple[int, int], choices: Sequence[tuple[int, ...]]
) -> None:
    """Holds what the reduction of a gradient takes, behind the operator that makes it: the summands that arrive, and a copy of a
    gradient that does not lie in order or is padded to equal shares."""
    part, model = problem.parts[k], problem.parts[k].model
    made = next((index for index, op in enumerate(model.graph.ops) if gradient in op.outputs), None)
    if made is None:
        return
    mesh, itemsize = problem.moves.mesh, ITEMSIZE[model.values[gradient].dtype]
    own, rows = problem.precision.gradient > 0, []
    for option in problem.ways[k, group].spread(model.options[group]):
        place, of = option.needed[name], option.made.get(gradient)
        partial = of.partial if of is not None else ()
        numel, row = problem.numel(place), []
        for level in choices:
            axes = axes_at_rest(place.axes, level, mesh)
            over, now = axes[STATES], partial
            copied = bool(model.values[gradient].order) or numel % prod(mesh.axis_size(axis) for axis in over) > 0
            if own and (problem.accumulated or axes[GRADIENT_AXES] != over):  # the rest is summed at the end of the step
                over, now = axes[GRADIENT_AXES], tuple(axis for axis in partial if axis in (*axes[GRADIENT_AXES], *place.axes))
            row.append((bool(now or over) + copied) * numel * itemsize)
        rows.append(row)
    after = part.point(made) + 1
    problem.sketch.pair_hold(*pair, after, after, SCRATCH, np.array(rows, np.int64))


def _tied(problem: Assembly, owner: int, name: str, user: int, as_name: str) -> None:
    """A weight that an earlier part owns."""
    if problem.alone:
        return
    for each in second_uses(problem, owner, name, problem, user, as_name):
        for when, seconds in each.spent:
            problem.sketch.pair_cost(*each.nodes, seconds, when)
        for span, kind, nbytes in each.holds:
            problem.sketch.pair_hold(*each.nodes, *span, kind, nbytes)


@dataclass(frozen=True, kw_only=True)
class SecondUse:
    """The cost of a weight at a group that does not own it, by options of owner and user. `nodes`: of both, each in its own
    problem; the spans are those of the user."""

    nodes: tuple[int, int]
    spent: tuple[tuple[str, Numbers], ...]
    holds: tuple[tuple[tuple[int, int], str, Numbers], ...]


def second_uses(
    problem: Assembly, owner: int, name: str, other: Assembly, user: int, as_name: str
) -> Iterator[SecondUse]:  # fmt: skip
    """A weight is resharded for its second use, and its gradient back. `other`: the problem of the user, which may be another
    piece of the same stage."""
    one, two, part = problem.parts[owner].model, other.parts[user].model, other.parts[user]
    first = one.uses[name][0].group
    there = problem.ways[owner, first].spread([option.needed[name] for option in one.options[first]])
    for use in two.uses[as_name]:
        needed = other.ways[user, use.group].spread([option.needed[as_name] for option in two.options[use.group]])
        seconds, nbytes, staging = problem.moves.tables(there, needed, ITEMSIZE[one.values[name].dtype])
        holds = []
        for first_op, last_op in use.spans:
            before = part.point(first_op) - 1
            holds += [((before, part.point(last_op)), MOVED, nbytes), ((before, before), SCRATCH, staging)]
        yield SecondUse(
            nodes=(problem.nodes[owner, first], other.nodes[user, use.group]),
            spent=(
                (FORWARD, (use.forward is not None) * seconds), (BACKWARD, ((use.backward is not None) + 1) * seconds)
            ),
            holds=tuple(holds),
        )  # fmt: skip
    if (back := _gradient_back(other, user, as_name)) is None:
        return
    group, after, made = back
    itemsize = ITEMSIZE[two.values[as_name].dtype]
    rows = [[_resharded(problem, source, target, itemsize) for source in made] for target in there]
    yield SecondUse(
        nodes=(problem.nodes[owner, first], other.nodes[user, group]), spent=(),
        holds=(((after, after), SCRATCH, np.array(rows, np.int64)),),
    )  # fmt: skip


def _gradient_back(other: Assembly, user: int, name: str) -> tuple[int, int, Sequence[Placed]] | None:
    """Of a weight's gradient: the group that makes it, the point behind its operator, and its placements by way."""
    part, model = other.parts[user], other.parts[user].model
    gradient = dict(model.graph.gradients).get(name)
    if gradient is None or gradient not in model.makers:
        return None
    group = model.makers[gradient]
    at = next(index for index, op in enumerate(model.graph.ops) if gradient in op.outputs)
    return group, part.point(at) + 1, other.ways[user, group].spread([option.made[gradient] for option in model.options[group]])


def _resharded(problem: Assembly, source: Placed, target: Placed, itemsize: int) -> int:
    """Bytes besides a gradient while it becomes one in the placement of its weight."""
    if source.dims == target.dims:
        return 0
    moves = problem.moves
    return moves.nbytes(source, target, itemsize) + moves.staging(source, target, itemsize, donated=True)


def _at_rest(
    problem: Assembly, option: Option, names: Sequence[str], gradients: Mapping[str, str], level: tuple[int, ...]
) -> AtRest:
    used = []
    for name in names:
        place = option.needed[name]
        gradient = option.made.get(gradients.get(name, ""))
        same = tuple(axis for axis in problem.moves.mesh.names if axis not in place.axes)
        summed = gradient.partial if gradient is not None else ()
        used.append(Used(numel=problem.numel(place), same=same, summed=summed))
    return at_rest(
        tuple(used), level, problem.moves.costs, problem.precision, problem.rates.memory,
        trained=any(name in gradients for name in names), accumulated=problem.accumulated,
    )  # fmt: skip


_KINDS: dict[str, Callable[[AtRest], float]] = {
    PARAMETERS: lambda each: each.weight_nbytes,
    GRADIENTS: lambda each: each.gradient_nbytes,
    OPTIMIZER: lambda each: each.state_nbytes,
}


def _level_words(mesh: Mesh, level: tuple[int, ...]) -> str:
    return " ".join(f"{axis}:{value}" for axis, value in zip(mesh.names, level, strict=True))
