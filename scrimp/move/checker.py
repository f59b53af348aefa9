"""The checker: a program is correct if each step obeys its typing rule and the chain ends in the target.

It shares no code with the search. Sizes and bytes come from the rules, not from tiles, so that it also cross-checks the costs of
`plan/steps.py`, which come from tiles. It compares the ranks' own tiles, from mesh coordinates, only for arbitrary exchanges and
unequal tiles.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import numpy as np

from scrimp.errors import MoveError
from scrimp.layout import Layout
from scrimp.move.program import KINDS, Program, Step


def check(program: Program) -> None:
    mesh, shape = program.mesh, program.shape
    program.src.validate(mesh, shape)
    program.dst.validate(mesh, shape)
    current = program.src.split(mesh)
    phase = 0
    for number, step in enumerate(program.steps, start=1):

        def fail(why: str, number: int = number, step: Step = step) -> None:
            raise MoveError(f"step {number} ({step.describe(mesh)}) of the program {program}: {why}")

        if step.kind not in KINDS:
            fail(f"'{step.kind}' is not a kind of step")
        if step.before != current:
            fail(f"it starts at {step.before}, but the step before it ends at {current}")
        step.after.validate(mesh, shape)
        if step.after != step.after.split(mesh):
            fail(f"it ends at {step.after}, which is not over prime sub-axes")
        RULES[step.kind](program, step, fail)
        if PHASE[step.kind] < phase:
            fail("the array must first fall in size, then stay, then rise")
        phase = PHASE[step.kind]
        if step.kind not in UNTILED:
            for dim, count in enumerate(step.after.counts(mesh)):
                if program.padded[dim] % count:
                    fail(f"dim {dim} of padded size {program.padded[dim]} is not divisible by {count}")
        local = step.after.local_numel(shape, mesh, program.padded)
        if local > program.cap_numel:
            fail(f"the local array has {local} elements, above the larger of source and target, {program.cap_numel}")
        received = _received(program, step)
        if received != step.received_numel:
            fail(f"it claims {step.received_numel} elements received, the rule gives {received}")
        current = step.after
    target = program.dst.split(mesh)
    if current != target:
        raise MoveError(f"the program {program} ends at {current}, not at its target {target}")
    _check_ends(program)


def _check_ends(program: Program) -> None:
    """Padded tiles must equal the user's tiles at both ends."""
    if all(step.kind in UNTILED for step in program.steps) and program.padded == program.shape:
        return
    for layout in (program.src, program.dst):
        for size, whole, count in zip(program.shape, program.padded, layout.counts(program.mesh), strict=True):
            if count > 1 and -(-size // count) * count != whole:
                raise MoveError(f"the program {program} pads {size} to {whole}, which does not tile {layout}")


Fail = Callable[[str], None]


def _slice(program: Program, step: Step, fail: Fail) -> None:
    used = {axis for axes in step.before.dims for axis in axes} | {*step.before.partial}
    if used & {*step.axes}:
        fail(f"axes {sorted(used & {*step.axes})} are in use already")
    _same_but(step, fail, pushed=step.dim, partial=step.before.partial)


def _reduce_scatter(program: Program, step: Step, fail: Fail) -> None:
    if not {*step.axes} <= {*step.before.partial}:
        fail(f"axes {step.axes} are not all partial in {step.before}")
    _same_but(step, fail, pushed=step.dim, partial=tuple(a for a in step.before.partial if a not in step.axes))


def _all_reduce(program: Program, step: Step, fail: Fail) -> None:
    if not {*step.axes} <= {*step.before.partial}:
        fail(f"axes {step.axes} are not all partial in {step.before}")
    _same_but(step, fail, partial=tuple(a for a in step.before.partial if a not in step.axes))


def _all_to_all(program: Program, step: Step, fail: Fail) -> None:
    if step.dim == step.to_dim:
        fail("both dims are the same")
    _same_but(step, fail, popped=step.dim, pushed=step.to_dim, partial=step.before.partial)


def _all_gather(program: Program, step: Step, fail: Fail) -> None:
    _same_but(step, fail, popped=step.dim, partial=step.before.partial)


def _permute(program: Program, step: Step, fail: Fail) -> None:
    before, after = step.before.counts(program.mesh), step.after.counts(program.mesh)
    if before != after:
        fail(f"it cuts the dims into {after} tiles, not {before} as before")
    _same_partial(step, fail)


def _exchange(program: Program, step: Step, fail: Fail) -> None:
    before, after = (prod(layout.counts(program.mesh)) for layout in (step.before, step.after))
    if before != after:
        fail(f"it cuts the array into {after} tiles, not {before} as before")
    _same_partial(step, fail)


def _direct(program: Program, step: Step, fail: Fail) -> None:
    _same_partial(step, fail)
    if step is not program.steps[-1]:
        fail("a direct exchange ends a program")


RULES: dict[str, Callable[[Program, Step, Fail], None]] = {
    "slice": _slice,
    "reduce_scatter": _reduce_scatter,
    "all_reduce": _all_reduce,
    "all_to_all": _all_to_all,
    "permute": _permute,
    "exchange": _exchange,
    "all_gather": _all_gather,
    "direct": _direct,
}
UNTILED = ("all_reduce", "direct")  # steps that do not cut a dim further, so tiles need not nest
PHASE = {
    "slice": 0, "reduce_scatter": 1, "all_reduce": 1, "all_to_all": 2, "permute": 2, "exchange": 2, "all_gather": 3,
    "direct": 4,
}  # fmt: skip


def _same_but(step: Step, fail: Fail, *, popped: int | None = None, pushed: int | None = None, partial: tuple[str, ...]) -> None:
    """`after` is `before` with the step's axes popped from one dim and pushed on another, and these partial axes."""
    if not step.axes:
        fail("it moves no axes")
    dims = [list(axes) for axes in step.before.dims]
    for dim in (popped, pushed):
        if dim is not None and not 0 <= dim < len(dims):
            fail(f"there is no dim {dim} in {step.before}")
    if popped is not None:
        if tuple(dims[popped][-len(step.axes) :]) != step.axes:
            fail(f"axes {step.axes} are not on top of dim {popped} of {step.before}")
        del dims[popped][-len(step.axes) :]
    if pushed is not None:
        dims[pushed] += step.axes
    expected = Layout(dims=tuple(map(tuple, dims)), partial=partial, factors=step.before.factors)
    if expected != step.after:
        fail(f"the rule gives {expected}, the step has {step.after}")


def _same_partial(step: Step, fail: Fail) -> None:
    if step.before.partial != step.after.partial:
        fail(f"partial axes change from {step.before.partial} to {step.after.partial} without a reduction")


def _received(program: Program, step: Step) -> int:
    """Elements received by the busiest device."""
    mesh, shape, padded = program.mesh, program.shape, program.padded
    members = 1
    for axis in step.axes:
        members *= mesh.axis_size(axis)
    before = step.before.local_numel(shape, mesh, padded)
    after = step.after.local_numel(shape, mesh, padded)
    if step.kind == "slice":
        return 0
    if step.kind == "reduce_scatter":
        return (members - 1) * after
    if step.kind == "all_reduce":
        return 2 * (-(-before * (members - 1) // members))
    if padded == shape and step.kind == "all_gather":
        return after - before
    if padded == shape and step.kind == "all_to_all":
        return after - after // members
    if step.kind == "permute" and padded == shape:
        return after if step.before != step.after else 0
    return _most_missing(program, step)


def _most_missing(program: Program, step: Step) -> int:
    """The most elements of any rank's new tile outside its old tile."""
    mesh = program.mesh
    grid = np.unravel_index(np.arange(mesh.size), [mesh.axis_size(sub) for sub in mesh.sub_axes] or [1])
    coordinate = dict(zip(mesh.sub_axes, grid, strict=False))
    wanted, shared = np.ones((2, mesh.size), dtype=np.int64)
    for dim, (size, whole) in enumerate(zip(program.shape, program.padded, strict=True)):
        spans = []
        for layout in (step.before, step.after):
            index, count = np.zeros(mesh.size, dtype=np.int64), 1
            for axis in reversed(layout.dims[dim]):
                index = index + coordinate[axis] * count
                count *= mesh.axis_size(axis)
            chunk = -(-whole // count)
            spans.append((np.clip(index * chunk, 0, size), np.clip(index * chunk + chunk, 0, size)))
        (old_start, old_stop), (start, stop) = spans
        wanted = wanted * (stop - start)
        shared = shared * np.clip(np.minimum(stop, old_stop) - np.maximum(start, old_start), 0, None)
    return int((wanted - shared).max())
