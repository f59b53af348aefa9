"""`synthesize`: takes candidates from the search, costs them exactly, checks them, and keeps the cheapest.

Candidates are the collective programs of `plan/search.py`; where `direct` is allowed also each of them with its flat steps fused
into one exchange, and the direct alltoallv. The cost is latency per message and bytes per second over the slowest axis that a
step crosses. Ties are broken by bytes, number of steps, and text, so that every rank of every run picks the same program.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from math import prod

from scrimp.cluster import Cluster
from scrimp.errors import LayoutError, MoveError
from scrimp.layout import Layout, Mesh, merge_axes
from scrimp.move.checker import check
from scrimp.move.plan.atoms import Atoms, glued_atoms, prime_atoms
from scrimp.move.plan.dtypes import ITEMSIZE, SUMMABLE, dtype_name
from scrimp.move.plan.search import EXACT_ATOMS, search
from scrimp.move.plan.shortcuts import shortcut
from scrimp.move.plan.space import Path, Space
from scrimp.move.plan.steps import all_reduce_step, fused, priced, steps_of
from scrimp.move.plan.tiles import missing_numel, tiles
from scrimp.move.program import FLAT, Program, Step, padding

_DEFAULT = Cluster()
MOST_DEVICES = 2**20


def synthesize(
    shape: Sequence[int],
    mesh: Mesh,
    src: Layout | str,
    dst: Layout | str,
    *,
    dtype: object = "float32",
    cluster: Cluster | None = None,
    direct: bool = True,
) -> Program:
    """The cheapest program from `src` to `dst` that never holds more than the larger of the two tiles.

    `direct=False` leaves out the alltoallv of arbitrary parts: collectives only (unless uneven tiles do not nest,
    where nothing else is possible).

    >>> import scrimp
    >>> program = scrimp.synthesize((8192, 8192), scrimp.Mesh({"x": 2, "y": 4}), "[x,y]", "[y,x]")
    >>> program.received_nbytes, program.peak_numel
    (33554432, 8388608)
    """
    links = (cluster or _DEFAULT).on(mesh)
    return _synthesize(tuple(shape), mesh, Layout.parse(src), Layout.parse(dst), dtype_name(dtype), links, direct)


@lru_cache(maxsize=16384)
def _synthesize(
    shape: tuple[int, ...], mesh: Mesh, src: Layout, dst: Layout, dtype: str, cluster: Cluster, direct: bool
) -> Program:
    _validate(shape, mesh, src, dst, dtype)
    start, end = src.split(mesh), dst.split(mesh)
    padded = padding(shape, mesh, src, dst)
    for sizes in (shape, padded or shape):
        _countable(sizes, mesh, dtype)

    def program(steps: tuple[Step, ...], padded: tuple[int, ...]) -> Program:
        steps = priced(steps, shape, padded, mesh, cluster, ITEMSIZE[dtype])
        return Program(shape=shape, padded=padded, mesh=mesh, src=src, dst=dst, dtype=dtype, steps=steps)

    if start == end:
        return program((), shape)
    candidates: list[Program] = []
    if padded is not None:
        for atoms, path in _paths(shape, padded, mesh, start, end, cluster, ITEMSIZE[dtype]):
            for links in (None, lambda axis: cluster.link([axis])) if cluster.axes else (None,):
                steps = steps_of(path, atoms, start, links)
                candidates.append(program(steps, padded))
                if direct and sum(step.kind in FLAT for step in steps) > 1:
                    candidates.append(program(fused(steps), padded))
    if direct or not candidates:
        candidates.append(_direct_program(program, candidates, shape, padded, start, end))
    candidates = [c for c in candidates if c.peak_numel <= c.cap_numel]
    best = min(candidates, key=_preference)
    check(best)
    return best


def _preference(program: Program) -> tuple[float, int, int, int, str]:
    """Cheapest first; of equals the fewest bytes, then the simplest steps."""
    kinds = [step.kind for step in program.steps]
    arbitrary = kinds.count("direct") + kinds.count("exchange")
    return round(program.seconds, 12), program.received_nbytes, arbitrary, len(kinds), str(program)


def _paths(
    shape: tuple[int, ...],
    padded: tuple[int, ...],
    mesh: Mesh,
    src: Layout,
    dst: Layout,
    cluster: Cluster,
    itemsize: int,
) -> list[tuple[Atoms, Path]]:
    def space(atoms: Atoms, *, by_size: bool = False) -> Space:
        return atoms.space(shape, padded, mesh, src, dst, cluster, itemsize, by_size=by_size)

    primes = prime_atoms(mesh)
    summed = src.partial != dst.partial
    if not summed:
        path = shortcut(space(primes))
        silent = path is not None and path.relabel is None and all(op.kind == "slice" for op in path.before + path.after)
        if path is not None and (silent or not cluster.axes):
            return [(primes, path)]
    at_least = 1.0 if not summed and not cluster.axes else 0.0
    if len(primes.names) <= EXACT_ATOMS:
        found = [(primes, p) for p in search(space(primes), at_least)]
    else:
        found = [(primes, p) for p in search(space(primes, by_size=True), at_least)]
        glued = glued_atoms(mesh, src, dst)
        best = min((p.price for _, p in found), default=float("inf"))
        found += [(glued, p) for p in search(space(glued), at_least, best)]
    return found if summed or path is None else [(primes, path), *found]


def _direct_program(
    program: Callable[[tuple[Step, ...], tuple[int, ...]], Program],
    collective: list[Program],
    shape: tuple[int, ...],
    padded: tuple[int, ...] | None,
    start: Layout,
    end: Layout,
) -> Program:
    """One alltoallv, after the reductions: those of the best collective program, or all-reduces where there is none."""
    reduced = tuple(axis for axis in start.partial if axis not in end.partial)
    steps: tuple[Step, ...] = ()
    if reduced and collective:
        best = min(collective, key=lambda c: (c.seconds, len(c.steps), str(c)))
        last = max(i for i, step in enumerate(best.steps) if step.kind in ("reduce_scatter", "all_reduce"))
        steps, padded = best.steps[: last + 1], best.padded
    elif reduced:
        steps = (all_reduce_step(start, reduced),)
    here = steps[-1].after if steps else start
    if here != end:
        steps += (Step(kind="direct", before=here, after=end),)
    return program(steps, padded or shape)


def _validate(shape: tuple[int, ...], mesh: Mesh, src: Layout, dst: Layout, dtype: str) -> None:
    for name, layout in (("source", src), ("target", dst)):
        try:
            layout.validate(mesh, shape)
        except LayoutError as error:
            raise LayoutError(f"{name} {error}") from None
    if src.factors != dst.factors:
        raise LayoutError(f"source {src} and target {dst} factor the dims differently; move on one factored shape")
    start, end = src.split(mesh), dst.split(mesh)
    new = [axis for axis in end.partial if axis not in start.partial]
    if new:
        raise MoveError(
            f"target {dst} is a partial sum over {[*merge_axes(new, mesh)]}, source {src} is not: "
            "a move may reduce partial sums or keep them, not create them"
        )
    if start.partial != end.partial and dtype not in SUMMABLE:
        raise MoveError(f"{src} -> {dst} must add {dtype} values, which loses precision; cast to a wider dtype first")


def _countable(shape: tuple[int, ...], mesh: Mesh, dtype: str) -> None:
    """Tiles are counted in 64 bits, one entry per rank."""
    if mesh.size > MOST_DEVICES:
        raise MoveError(f"mesh {mesh} has {mesh.size:,} devices; a move is planned for at most {MOST_DEVICES:,}")
    nbytes = prod(shape) * ITEMSIZE[dtype]
    if max(nbytes, *shape, 0) >= 2**63:
        raise MoveError(
            f"an array of the shape {','.join(map(str, shape))} in {dtype} has {nbytes:,} bytes; a move is planned for less than "
            f"2 ** 63 = {2**63:,}: give a smaller shape"
        )


def lower_bound_numel(shape: Sequence[int], mesh: Mesh, src: Layout | str, dst: Layout | str) -> int:
    """A lower bound of the elements that some device receives in any program: its target tile less the part it holds already. For
    layouts without partial sums."""
    have, want = (tiles(Layout.parse(layout), tuple(shape), mesh) for layout in (src, dst))
    return int(missing_numel(have, want).max())


def clear_program_cache() -> None:
    """Clears the cache of programs, so that the next synthesis is a cold one: for benchmarks."""
    _synthesize.cache_clear()
    tiles.cache_clear()
