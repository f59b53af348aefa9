"""The search for collective programs in normal form.

A type is, for each dim, the stack of mesh atoms it is split over (an atom is a prime sub-axis, or a run of them
that never part). A program in normal form is

    src --slice*, reduce_scatter*--> a --all_to_all*--> [permute] --all_to_all*--> b --all_gather*--> dst

With L the local size between a and b, and item the bytes of an element, its price is, over a link of rate B,

    fall   a reduce_scatter over m:   L_before * (m-1)/m / B          (slices are free)
    flat   an all_to_all over m:      L * (m-1)/m / B;   a permute:   L / B
    rise   all gathers together:      (L_out - L) / B

plus a latency per message. So the search walks from both ends towards the middle: `fall` lists the types a, `rise`
the types b (a gather is a push seen from the end), all_to_alls widen either list by a level, and the two lists meet
either in the same type, or in types whose dims are cut into equally many tiles, joined by a permute. Since every
all_to_all costs at least L/2, few levels are enough: a path is dropped once it costs as much as the best one found.

Two spaces are searched. In the label space atoms keep their names; it finds programs without a permute and is exact
on small meshes. In the size space atoms of equal size are the same; only permuted programs can be found there, but it
has as many types as there are ways to write a size (715 for 512 devices and 4 dims), so it never explodes.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from typing import TypeVar

from scrimp.move.plan.space import Node, Op, Path, Space, Type

Entry = TypeVar("Entry")

EXACT_ATOMS = 4  # up to so many atoms the label space is searched exhaustively
LABEL_TYPES = 300  # beyond so many types on a side, the label space keeps those with the fewest pushes
SIZE_TYPES = 800  # the same for the size space, where 512 devices and 4 dims have 715
SUMMED_TYPES = 60  # the same for types with placed sums, of which there are many
KEEP = 4  # programs that are costed exactly
ROUNDING = 1e-9  # tolerance for sums of costs in another order


def search(space: Space, at_least: float, best: float = float("inf")) -> list[Path]:
    """The cheapest programs in this space, best first, below the cost `best`. `at_least`: lower bound of the flat steps' cost in
    local sizes (`plan/shortcuts.py` has found cheaper ones)."""
    found = _Found(space, at_least, best)
    front, back = _fall(space), _rise(space)
    found.join(front, back)
    front_1 = _all_to_all(space, front, found, back, reverse=False)
    found.join(front_1, back)
    back_1 = _all_to_all(space, back, found, front, reverse=True)
    found.join(front, back_1)
    found.join(front_1, back_1)
    front_2 = _all_to_all(space, front_1, found, back_1, reverse=False, last=True)
    found.join(front_2, back_1)
    return found.paths()


class _Found:
    """The programs found so far, and the cost that a better one must beat."""

    def __init__(self, space: Space, at_least: float, best: float) -> None:
        self.space = space
        self.out = space.local(space.counts(space.dst))
        self.fastest = min(space.pace, default=0.0)
        self.at_least = at_least
        self.best = best
        self.all: dict[object, Path] = {}
        self.prices: list[float] = []  # the KEEP cheapest
        self.limit = 2 * best  # programs above this cannot matter any more

    def hopeless(self, price: float, flat: float, local: int, *, reverse: bool) -> bool:
        """Whether no program through this node can be the best: its flat steps have a least cost, and from the front it must
        still grow to the end's size."""
        rise = 0 if reverse else self.out - local
        more = max(flat, self.at_least) - flat
        return price + (rise + more * local) * self.fastest >= self.best

    def join(self, front: dict[object, Node], back: dict[object, Node]) -> None:
        if not self.space.by_size:
            for key in front.keys() & back.keys():
                self._add(front[key], back[key], None, 0.0)
        ends = _cheapest(back)
        for node in front.values():
            other = ends.get(node.counts)
            if other is None or other.dims == node.dims or node.price + other.price > self.limit:
                continue
            self._add(node, other, other.dims, self._permute_price(node, other))

    def rest(self, others: dict[object, Node]) -> dict[int, float]:
        """For each local size the least remaining cost of a path that the others complete: the cheapest of them, and in the size
        space the permute that joins."""
        rest: dict[int, float] = {}
        for node in others.values():
            rest[node.local] = min(rest.get(node.local, node.price), node.price)
        if not self.space.by_size:
            return rest
        latency = min(self.space.latency, default=0.0)
        return {local: price + latency + local * self.fastest for local, price in rest.items()}

    def _permute_price(self, a: Node, b: Node) -> float:
        moved = {atom for have, want in zip(a.dims, b.dims, strict=True) if have != want for atom in {*have, *want}}
        space = self.space
        return max(space.latency[atom] for atom in moved) + a.local * max(space.pace[atom] for atom in moved)

    def _add(self, a: Node, b: Node, relabel: Type | None, price: float) -> None:
        price += a.price + b.price
        if price > self.limit:
            return
        self.best = min(self.best, price)
        path = Path(price=price, before=a.ops, relabel=relabel, after=b.ops[::-1])
        kinds = tuple(op.kind for op in path.before + path.after)
        # One program per outline: those that differ only in labels cost the same.
        outline = (round(price, 15), relabel is None, kinds.count("all_to_all"), len(path.after))
        old = self.all.get(outline)
        if old is None:
            insort(self.prices, price)
            del self.prices[KEEP:]
        last = self.prices[-1] if len(self.prices) == KEEP else float("inf")
        self.limit = min(2 * self.best, last) * (1 + ROUNDING) + ROUNDING**2
        if old is None or (len(kinds), path.before, path.after) < (len(old.before + old.after), old.before, old.after):
            self.all[outline] = path

    def paths(self) -> list[Path]:
        order = sorted(self.all.values(), key=lambda path: (path.price, len(path.before) + len(path.after)))
        return order[:KEEP]


def _cheapest(nodes: dict[object, Node]) -> dict[tuple[int, ...], Node]:
    """The cheapest type for each number of tiles per dim."""
    cheapest: dict[tuple[int, ...], Node] = {}
    for node in nodes.values():
        other = cheapest.get(node.counts)
        if other is None or node.price < other.price:
            cheapest[node.counts] = node
    return cheapest


def _fall(space: Space) -> dict[object, Node]:
    """All types that slices, then the reduce_scatters of every reduced atom, make of src."""
    counts = space.counts(space.src)
    start = Node(space.src, counts, space.local(counts), 0.0, 0.0, ())
    used = {atom for atoms in space.src for atom in atoms} | {*space.reduced, *space.kept}
    sliced = _push_all(space, start, [a for a in range(len(space.sizes)) if a not in used], lambda *_: ("slice", 0.0))
    if not space.reduced:
        return sliced

    def scatter(before: int, after: int, atom: int) -> tuple[str, float]:
        messages = space.sizes[atom] - 1
        return "reduce_scatter", space.latency[atom] * messages + messages * after * space.pace[atom]

    reduced: dict[object, Node] = {}
    some = sliced.values() if len(space.sizes) <= EXACT_ATOMS else _smallest(sliced)
    for node in some:
        whole = _reduced_whole(space, node)
        key = space.key(whole.dims)
        if key not in reduced or whole.price < reduced[key].price:
            reduced[key] = whole
        for key, full in _push_all(space, node, list(space.reduced), scatter, whole=True).items():
            if key not in reduced or full.price < reduced[key].price:
                reduced[key] = full
    return reduced


def _smallest(nodes: dict[object, Node]) -> list[Node]:
    """Those with the smallest partial sums, and the one without slices."""
    return sorted(nodes.values(), key=lambda node: (bool(node.ops), node.local))[:SUMMED_TYPES]


def _reduced_whole(space: Space, node: Node) -> Node:
    """All-reduces everything at once: for tiles that the summands do not divide."""
    block = space.block(space.reduced)
    rounds = sum(size - 1 for size in block.sizes)
    nbytes = 2 * node.local * (block.members - 1) / block.members
    price = node.price + 2 * rounds * block.latency + nbytes * block.pace
    return node._replace(price=price, ops=(*node.ops, Op("all_reduce", space.reduced)))


def _rise(space: Space) -> dict[object, Node]:
    """All types from which gathers alone reach dst."""
    counts = space.counts(space.dst)
    start = Node(space.dst, counts, space.local(counts), 0.0, 0.0, ())
    used = {atom for atoms in space.dst for atom in atoms} | {*space.kept}

    def gather(before: int, after: int, atom: int) -> tuple[str, float]:
        messages = space.sizes[atom] - 1
        return "all_gather", space.latency[atom] * messages + (before - after) * space.pace[atom]

    return _push_all(space, start, [a for a in range(len(space.sizes)) if a not in used], gather)


def _push_all(
    space: Space,
    start: Node,
    atoms: list[int],
    price: Callable[[int, int, int], tuple[str, float]],
    whole: bool = False,
) -> dict[object, Node]:
    """Every way to push some of the atoms (or, `whole`, all of them) on the dims, fewest pushes first."""
    rank = len(space.shape)
    likes = {atom: _like(space, atom) for atom in atoms}
    uniform = len({*space.pace}) <= 1 and len({*space.latency}) <= 1
    level: dict[object, Node] = {space.key(start.dims): start}
    found = dict(level)
    for _ in atoms:
        wider: dict[object, Node] = {}
        for node in level.values():
            taken = {atom for stack in node.dims for atom in stack}
            tried: set[object] = set()
            for atom in atoms:
                if atom in taken or likes[atom] in tried:
                    continue  # of interchangeable atoms only the first free one is pushed
                tried.add(likes[atom])
                for dim in range(rank):
                    count = node.counts[dim] * space.sizes[atom]
                    if space.padded[dim] % count:
                        continue
                    dims = node.dims[:dim] + ((*node.dims[dim], atom),) + node.dims[dim + 1 :]
                    key = space.key(dims)
                    known = wider.get(key)
                    if known is not None and (uniform or known.price <= node.price):
                        continue  # with different links the order of pushes matters
                    counts = node.counts[:dim] + (count,) + node.counts[dim + 1 :]
                    local = space.local(counts)
                    kind, cost = price(node.local, local, atom)
                    if known is not None and known.price <= node.price + cost:
                        continue
                    wider[key] = Node(dims, counts, local, node.price + cost, 0.0, (*node.ops, Op(kind, (atom,), dim)))
        if whole and len(wider) > LABEL_TYPES:  # of ways to place the same atoms keep the cheapest
            wider = dict(sorted(wider.items(), key=lambda item: item[1].price)[:LABEL_TYPES])
        level = wider
        found.update(wider)
        if len(space.sizes) > EXACT_ATOMS and not whole and len(found) > (SIZE_TYPES if space.by_size else LABEL_TYPES):
            break
    return level if whole else found


def _like(space: Space, atom: int) -> object:
    """Atoms with equal keys are interchangeable: all of a size in the size space, else those that neither end names."""
    named = any(atom in atoms for atoms in (*space.src, *space.dst)) or atom in space.reduced
    if named and not space.by_size:
        return atom
    return ("like", space.sizes[atom], space.latency[atom], space.pace[atom])


def _all_to_all(
    space: Space,
    nodes: dict[object, Node],
    found: _Found,
    others: dict[object, Node],
    *,
    reverse: bool,
    last: bool = False,
) -> dict[object, Node]:
    """Every type one all_to_all further (or, reversed, one before) that may yet be joined with one of the others, or, unless it
    is the `last` time, with what all_to_alls make of them. This is the hot loop: tests that hold for all target dims run before
    the loop over them, and costs are computed before types."""
    reached: dict[object, Node] = {}
    even = space.shape == space.padded  # an all_to_all then keeps the local size, and only equal sizes are joined
    rest = found.rest(others)
    block_of, by_size = space.block, space.by_size
    targets = _Targets(space, _cheapest(others) if last else None)
    for node in nodes.values():
        least = node.price + node.local * found.fastest / 2
        if found.hopeless(least, node.flat + 0.5, node.local, reverse=reverse):
            continue  # not even an all_to_all of two helps
        more = rest.get(node.local) if even else 0.0
        if more is None or least + more > found.limit:
            continue
        before = node.ops[-1] if node.ops else None
        came = before.atoms if before is not None and before.kind == "all_to_all" else None
        names = tuple([block_of(stack).kinds for stack in node.dims]) if by_size else node.dims
        for dim, stack in enumerate(node.dims):
            for split in range(len(stack)):
                moved = stack[split:]
                if moved == came:
                    continue  # the block that came last could have gone there directly
                block = block_of(moved)
                m = block.members
                goals = targets.of(node.counts, dim, m)
                if not goals:
                    continue
                flat = (m - 1) / m
                price = node.price + block.latency * (m - 1) + node.local * block.pace * flat
                flat += node.flat
                if price + more > found.limit:
                    continue
                if even and (node.local > space.cap or found.hopeless(price, flat, node.local, reverse=reverse)):
                    continue
                left = stack[:split]
                left_name = block_of(left).kinds if by_size else left
                for to_dim, counts in goals:
                    grown = node.dims[to_dim] + moved
                    key = _with(names, dim, left_name, to_dim, names[to_dim] + block.kinds if by_size else grown)
                    old = reached.get(key)
                    if old is not None and old.price <= price:
                        continue
                    local = node.local if even else space.local(counts)
                    if not even and (local > space.cap or found.hopeless(price, flat, local, reverse=reverse)):
                        continue
                    op = Op("all_to_all", moved, to_dim, dim) if reverse else Op("all_to_all", moved, dim, to_dim)
                    dims = _with(node.dims, dim, left, to_dim, grown)
                    reached[key] = Node(dims, counts, local, price, flat, (*node.ops, op))
    return reached


class _Targets:
    """The dims that a block may go to, and the resulting tiles per dim: those that the sizes allow and, if given, the ends have.
    Cached, because calls repeat for few different tiles."""

    def __init__(self, space: Space, ends: dict[tuple[int, ...], Node] | None) -> None:
        self.padded = space.padded
        self.ends = ends
        self.known: dict[tuple[tuple[int, ...], int, int], list[tuple[int, tuple[int, ...]]]] = {}

    def of(self, counts: tuple[int, ...], dim: int, members: int) -> list[tuple[int, tuple[int, ...]]]:
        known = self.known.get((counts, dim, members))
        if known is None:
            known = []
            for to_dim, count in enumerate(counts):
                after = _with(counts, dim, counts[dim] // members, to_dim, count * members)
                fits = to_dim != dim and self.padded[to_dim] % (count * members) == 0
                if fits and (self.ends is None or after in self.ends):
                    known.append((to_dim, after))
            self.known[counts, dim, members] = known
        return known


def _with(entries: tuple[Entry, ...], dim: int, entry: Entry, to_dim: int, to_entry: Entry) -> tuple[Entry, ...]:
    """A copy with two entries replaced."""
    out = list(entries)
    out[dim], out[to_dim] = entry, to_entry
    return tuple(out)
