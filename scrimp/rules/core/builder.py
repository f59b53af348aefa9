"""A rule while it is being written."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from scrimp.rules.core.call import Call
from scrimp.rules.core.rule import FREE, WHOLE, Dims, Factor, Rule, Talk

REALS = ("float16", "bfloat16", "float32", "float64")


class Draft:
    """Factors are made with `dim`; inputs that nobody describes with `put` stay whole."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.factors: list[Factor] = []
        self.inputs: dict[int, Dims] = {}

    def dim(self, size: int, kind: str = FREE, *, ranged: bool = False) -> tuple[int, ...]:
        """A new factor, as the one of a dim; none for a dim of size 1."""
        if size == 1:
            return ()
        self.factors.append(Factor(size=size, kind=kind, ranged=ranged))
        return (len(self.factors) - 1,)

    def dims(self, shape: Iterable[int], kind: str = FREE) -> Dims:
        return tuple(self.dim(size, kind) for size in shape)

    def put(self, name: str, dims: Dims) -> None:
        """Describe an argument, if it is a tensor in this call."""
        index = self.call.at(name)
        if index is not None:
            self.inputs[index] = dims

    def stretched(self, name: str, dims: Dims) -> None:
        """Describe an argument that is broadcast to these dims: what it lacks, or has once, is the same for all of a factor."""
        index = self.call.at(name)
        if index is not None:
            self.inputs[index] = stretched(self.call.shapes[index], dims)

    def rule(
        self,
        *outputs: Dims | None,
        linear: Iterable[Sequence[str]] = (),
        talks: Iterable[Talk] = (),
    ) -> Rule:
        """`linear` by names; of an argument that is no tensor in this call nothing is said."""
        named = (frozenset(i for i in map(self.call.at, names) if i is not None) for names in linear)
        return self.made(outputs, linear=named, talks=talks)

    def made(self, outputs: Sequence[Dims | None], *, linear: Iterable[frozenset[int]], talks: Iterable[Talk] = ()) -> Rule:
        shapes, op = self.call.shapes, self.call.op
        inputs = tuple(self.inputs[i] if i in self.inputs else self.dims(shapes[i], WHOLE) for i in range(len(shapes)))
        return Rule(
            factors=tuple(self.factors),
            inputs=inputs,
            outputs=tuple(None if name is None else dims for name, dims in zip(op.outputs, outputs, strict=False)),
            linear=tuple(dict.fromkeys(members for members in linear if members and self._may_be_parts(members))),
            talks=tuple(talks),
        )

    def _may_be_parts(self, members: frozenset[int]) -> bool:
        """Real numbers, and all of a value: one that stands twice among the inputs is in parts in both places, so that x * x is
        not linear."""
        names = self.call.op.inputs
        alike = all((names[i] == names[j]) <= (j in members) for i in members for j in range(len(names)))
        return alike and all(self.call.dtypes[i] in REALS for i in members)


def stretched(shape: Sequence[int], dims: Dims) -> Dims:
    behind = dims[len(dims) - len(shape) :]
    return tuple(() if size == 1 else dim for size, dim in zip(shape, behind, strict=True))


def broadcast(shapes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The shape that tensors of these have together."""
    rank = max(map(len, shapes), default=0)
    wide = [(*[1] * (rank - len(shape)), *shape) for shape in shapes]
    return tuple(next((size for size in sizes if size != 1), 1) for sizes in zip(*wide, strict=True))
