"""Turns a path of the search into steps: merges pushes on one dim into one call, and costs every step exactly."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod

from scrimp.cluster import Cluster, Link
from scrimp.layout import Layout, Mesh
from scrimp.move.plan.atoms import Atoms
from scrimp.move.plan.space import Op, Path
from scrimp.move.plan.tiles import missing_numel, sources, tiles
from scrimp.move.program import FLAT, Program, Step

Call = tuple[str, int, tuple[str, ...]]  # kind, dim, axes


def steps_of(path: Path, atoms: Atoms, start: Layout, links: Callable[[str], Link] | None = None) -> tuple[Step, ...]:
    """The steps of a path, sub-axes merged into calls over products of axes. With `links` only axes of the same link are merged,
    since a call over a slow and a fast axis runs at the pace of the slow one; reductions begin with the fast links, while the
    array is large, and gathers with the slow ones, while it is small."""
    steps: list[Step] = []
    here = start

    def add(kind: str, axes: tuple[str, ...], dim: int, to_dim: int | None = None) -> None:
        nonlocal here
        dims = [list(stack) for stack in here.dims]
        partial = here.partial
        if kind in ("all_to_all", "all_gather"):
            del dims[dim][-len(axes) :]
        if kind != "all_gather":
            dims[dim if to_dim is None else to_dim] += axes
        if kind == "reduce_scatter":
            partial = tuple(axis for axis in partial if axis not in axes)
        after = Layout(dims=tuple(map(tuple, dims)), partial=partial, factors=here.factors)
        steps.append(Step(kind=kind, before=here, after=after, axes=axes, dim=dim, to_dim=to_dim))
        here = after

    sums = _by_dim(path.before, "reduce_scatter", atoms, links)
    if links:
        sums = _interleaved(sums, lambda axis: -links(axis).bytes_per_second)
    for kind, dim, axes in _by_dim(path.before, "slice", atoms, None) + sums:
        add(kind, axes, dim)
    for op in path.before:
        if op.kind == "all_reduce":
            steps.append(all_reduce_step(here, atoms.axes(op.atoms)))
            here = steps[-1].after
    for op in path.before:
        if op.kind == "all_to_all":
            add("all_to_all", atoms.axes(op.atoms), op.dim, op.to_dim)
    if path.relabel is not None:
        after = atoms.layout(path.relabel, here, here.partial)
        steps.append(Step(kind="permute", before=here, after=after))
        here = after
    for op in path.after:
        if op.kind == "all_to_all":
            add("all_to_all", atoms.axes(op.atoms), op.dim, op.to_dim)
    # Ops after the middle were found from the end: the last push there is the first gather, and the top of its stack.
    # Dim 0 comes last, where the array is largest, since a gather on dim 0 needs no copy.
    gathers = _by_dim(tuple(reversed(path.after)), "all_gather", atoms, links)
    gathers.reverse()  # the top of a stack first
    gathers.sort(key=lambda gather: -gather[1])
    if links:
        gathers = _interleaved(gathers, lambda axis: links(axis).bytes_per_second)
    for kind, dim, axes in gathers:
        add(kind, axes, dim)
    return tuple(_join_all_reduces(steps))


def _interleaved(calls: list[Call], key: Callable[[str], float]) -> list[Call]:
    """Keeps the order of calls on one dim; among the dims, the one whose next call has the least key goes next."""
    left = list(calls)
    out = []
    while left:
        heads = {dim: call for call in reversed(left) for dim in [call[1]]}  # the first call of each dim
        best = min(heads.values(), key=lambda call: (key(call[2][0]), left.index(call)))
        left.remove(best)
        out.append(best)
    return out


def _by_dim(ops: Sequence[Op], kind: str, atoms: Atoms, links: Callable[[str], Link] | None) -> list[Call]:
    """The pushes of one kind, merged per dim as far as possible; bottom of the stack first."""
    stacks: dict[int, list[tuple[str, ...]]] = {}
    order: list[tuple[int, int]] = []
    for op in ops:
        if op.kind != kind:
            continue
        for axis in atoms.axes(op.atoms):
            runs = stacks.setdefault(op.dim, [])
            if runs and (links is None or links(runs[-1][-1]) == links(axis)):
                runs[-1] += (axis,)
            else:
                order.append((op.dim, len(runs)))
                runs.append((axis,))
    return [(kind, dim, stacks[dim][run]) for dim, run in order]


def _join_all_reduces(steps: list[Step]) -> list[Step]:
    """Turns reduce_scatter then all_gather of the same axes on the same dim, with nothing between, into one all_reduce."""
    for first, (a, b) in enumerate(itertools.pairwise(steps)):
        if (a.kind, b.kind) == ("reduce_scatter", "all_gather") and (a.dim, a.axes) == (b.dim, b.axes):
            return _join_all_reduces([*steps[:first], all_reduce_step(a.before, a.axes), *steps[first + 2 :]])
    return steps


def all_reduce_step(before: Layout, axes: tuple[str, ...]) -> Step:
    partial = tuple(axis for axis in before.partial if axis not in axes)
    after = Layout(dims=before.dims, partial=partial, factors=before.factors)
    return Step(kind="all_reduce", before=before, after=after, axes=axes)


def fused(steps: tuple[Step, ...]) -> tuple[Step, ...]:
    """The same program with its flat steps as one exchange."""
    flat = [k for k, step in enumerate(steps) if step.kind in FLAT]
    first, last = flat[0], flat[-1]
    one = Step(kind="exchange", before=steps[first].before, after=steps[last].after)
    return (*steps[:first], one, *steps[last + 1 :])


def priced(
    steps: tuple[Step, ...],
    shape: tuple[int, ...],
    padded: tuple[int, ...],
    mesh: Mesh,
    cluster: Cluster,
    itemsize: int,
) -> tuple[Step, ...]:
    """The steps with bytes, messages and seconds, from the tiles of all ranks."""
    out = []
    for step in steps:
        received, messages = _traffic(step, shape, padded, mesh)
        seconds = step_link(step, cluster).seconds(messages, received * itemsize) if messages else 0.0
        out.append(replace(step, received_numel=received, messages=messages, seconds=seconds))
    return tuple(out)


def step_link(step: Step, cluster: Cluster) -> Link:
    """The slowest link that a step crosses."""
    return cluster.link(step.axes or _changed_axes(step))


def seconds_on(program: Program, cluster: Cluster) -> float:
    """What a program takes on a cluster that has the links of its mesh (`Cluster.on`)."""
    found = 0.0
    for step in program.steps:
        if step.messages:
            link = step_link(step, cluster)
            found += step.messages * link.latency_seconds + step.received_numel * program.itemsize / link.bytes_per_second
    return found


def _traffic(step: Step, shape: tuple[int, ...], padded: tuple[int, ...], mesh: Mesh) -> tuple[int, int]:
    """Elements received by the busiest device, and messages in sequence: a gather or a sum over n devices can go by doubling, in
    sum(p - 1) rounds over the prime factors of n; where every device has different data for every other, each sends a message of
    its own."""
    if step.kind == "slice":
        return 0, 0
    sizes = [mesh.axis_size(axis) for axis in step.axes]
    members, rounds = prod(sizes), sum(size - 1 for size in sizes)
    have, want = (tiles(layout, shape, mesh, padded) for layout in (step.before, step.after))
    if step.kind == "reduce_scatter":
        return (members - 1) * int(want.numel.max()), rounds
    if step.kind == "all_reduce":
        return 2 * (-(-int(have.numel.max()) * (members - 1) // members)), 2 * rounds
    received = int(missing_numel(have, want).max())
    if step.kind in ("exchange", "direct"):
        return received, int(sources(have, want).max())
    if step.kind == "permute":
        return received, 1
    return received, rounds if step.kind == "all_gather" else members - 1


def _changed_axes(step: Step) -> tuple[str, ...]:
    """The axes at different places before and after."""
    places = [
        {axis: (dim, k) for dim, axes in enumerate(layout.dims) for k, axis in enumerate(axes)}
        for layout in (step.before, step.after)
    ]
    return tuple(sorted(axis for axis in {**places[0], **places[1]} if places[0].get(axis) != places[1].get(axis)))
