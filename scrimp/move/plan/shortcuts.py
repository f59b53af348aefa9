"""The three programs that need no search. Notation as in `plan/search.py`: S and D are the stacks of src and dst.

Without partial sums a program whose flat steps cost f * L receives L_out - (1 - f) * L in all, L being the local size
while it is flat. So f = 0 is best, then one all_to_all (f = (m-1)/m), then anything with f = 1, of which a bare
permute is one. Each of the three, where it exists, is found at once:

    no flat step    a type that extends S and D on every dim: the longer of the two stacks, if one begins with the
                    other and no atom is then used twice
    one all_to_all  the same, but some atoms are used twice, all of them in S on one dim and in D on one other: the
                    block that moves begins with the first of them and holds the rest of that stack
    one permute     cut every dim into lcm(count in S, count in D) tiles on both sides, if there are atoms enough

Where none exists, a program has f = 1 by several all_to_alls, or f > 1, and `plan/search.py` searches.
"""

from __future__ import annotations

from math import lcm, prod

from scrimp.layout import prime_factors
from scrimp.move.plan.space import Op, Path, Space, Type


def shortcut(space: Space) -> Path | None:
    """The best program with f <= 1 and at most one flat step, for a move without partial sums."""
    return _no_or_one_all_to_all(space) or _one_permute(space)


def _no_or_one_all_to_all(space: Space) -> Path | None:
    src, dst = space.src, space.dst
    for have, want in zip(src, dst, strict=True):
        if have[: len(want)] != want[: len(have)]:
            return None
    src_dim = {atom: dim for dim, stack in enumerate(src) for atom in stack}
    dst_dim = {atom: dim for dim, stack in enumerate(dst) for atom in stack}
    moved = [atom for atom, dim in dst_dim.items() if src_dim.get(atom, dim) != dim]
    if not moved:
        pushed = [Op("slice", (atom,), dim) for dim, atom in _rest(dst, src)]
        popped = [Op("all_gather", (atom,), dim) for dim, atom in _rest(src, dst)]
        return Path(price=0.0, before=tuple(pushed), relabel=None, after=tuple(reversed(popped)))
    # `dst_dim` lists each stack from its bottom, so the first moved atom is the bottom of the block.
    first = moved[0]
    dim, to_dim = src_dim[first], dst_dim[first]
    if any((src_dim[atom], dst_dim[atom]) != (dim, to_dim) for atom in moved):
        return None
    cut, start = src[dim].index(first), dst[to_dim].index(first)
    tail, goal = src[dim][cut:], dst[to_dim][start:]
    if cut < len(dst[dim]) or tail[: len(goal)] != goal[: len(tail)] or any(a not in tail for a in moved):
        return None
    extra = goal[len(tail) :]  # sliced on top of the block before it moves, so that it moves along
    block = tail + extra
    pushed = [Op("slice", (atom,), d) for d, atom in _rest(dst, src) if atom not in block]
    pushed += [Op("slice", (atom,), dim) for atom in extra]
    if space.padded[dim] % (prod(space.sizes[a] for a in src[dim] + extra)):
        return None
    arrived = dst[to_dim][:start] + block
    if space.padded[to_dim] % prod(space.sizes[a] for a in arrived):
        return None
    middle = [*src]
    middle[dim], middle[to_dim] = src[dim][:cut], arrived
    popped = [Op("all_gather", (atom,), d) for d, atom in _rest(tuple(middle), dst)]
    before = (*pushed, Op("all_to_all", block, dim, to_dim))
    return Path(price=0.0, before=before, relabel=None, after=tuple(reversed(popped)))


def _rest(longer: Type, shorter: Type) -> list[tuple[int, int]]:
    """(dim, atom) of the longer type beyond the shorter one, bottom first."""
    pairs = enumerate(zip(longer, shorter, strict=True))
    return [(dim, atom) for dim, (stack, other) in pairs for atom in stack[len(other) :]]


def _one_permute(space: Space) -> Path | None:
    counts = [lcm(a, b) for a, b in zip(space.counts(space.src), space.counts(space.dst), strict=True)]
    front = _grown(space, space.src, counts)
    back = _grown(space, space.dst, counts)
    if front is None or back is None:
        return None
    pushed = tuple(Op("slice", (atom,), dim) for dim, atom in _rest(front, space.src))
    popped = tuple(Op("all_gather", (atom,), dim) for dim, atom in _rest(back, space.dst))
    return Path(price=0.0, before=pushed, relabel=back, after=tuple(reversed(popped)))


def _grown(space: Space, dims: Type, counts: list[int]) -> Type | None:
    """`dims` with free atoms pushed until every dim is cut into so many tiles; the fastest links first."""
    taken = {atom for stack in dims for atom in stack} | {*space.kept}
    free = [atom for atom in range(len(space.sizes)) if atom not in taken]
    order = sorted(free, key=lambda atom: (space.pace[atom], space.latency[atom], -atom))
    grown = []
    for stack, have, want in zip(dims, space.counts(dims), counts, strict=True):
        for factor in prime_factors(want // have):
            atom = next((a for a in order if space.sizes[a] == factor), None)
            if atom is None:
                return None
            order.remove(atom)
            stack = (*stack, atom)
        grown.append(stack)
    return tuple(grown)
