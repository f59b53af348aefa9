"""`Draft`: builds a rule step by step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from scrimp.rules.core.call import Call
from scrimp.rules.core.rule import FREE, WHOLE, Dims, Factor, Rule, Scratch, Talk

REALS = ("float16", "bfloat16", "float32", "float64")


class Draft:
    """`dim` makes factors; inputs without a `put` stay unsplit."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.factors: list[Factor] = []
        self.inputs: dict[int, Dims] = {}

    def dim(self, size: int, kind: str = FREE, *, ranged: bool = False) -> tuple[int, ...]:
        """A new factor, as the only one of a dim; none for a dim of size 1."""
        if size == 1:
            return ()
        self.factors.append(Factor(size=size, kind=kind, ranged=ranged))
        return (len(self.factors) - 1,)

    def dims(self, shape: Iterable[int], kind: str = FREE) -> Dims:
        return tuple(self.dim(size, kind) for size in shape)

    def put(self, name: str, dims: Dims) -> None:
        """Describes an argument, if it is a tensor in this call."""
        index = self.call.at(name)
        if index is not None:
            self.inputs[index] = dims

    def stretched(self, name: str, dims: Dims) -> None:
        """Describes an argument that is broadcast to these dims: dims that it lacks, or has with size 1, are not split."""
        index = self.call.at(name)
        if index is not None:
            self.inputs[index] = stretched(self.call.shapes[index], dims)

    def rule(
        self,
        *outputs: Dims | None,
        linear: Iterable[Sequence[str]] = (),
        talks: Iterable[Talk] = (),
        scratch: Iterable[Scratch] = (),
    ) -> Rule:
        """`linear`: by argument names; arguments that are no tensors in this call are ignored."""
        named = (frozenset(i for i in map(self.call.at, names) if i is not None) for names in linear)
        return self.made(outputs, linear=named, talks=talks, scratch=scratch)

    def made(
        self, outputs: Sequence[Dims | None], *, linear: Iterable[frozenset[int]], talks: Iterable[Talk] = (),
        scratch: Iterable[Scratch] = (),
    ) -> Rule:  # fmt: skip
        shapes, op = self.call.shapes, self.call.op
        inputs = tuple(self.inputs[i] if i in self.inputs else self.dims(shapes[i], WHOLE) for i in range(len(shapes)))
        return Rule(
            factors=tuple(self.factors),
            inputs=inputs,
            outputs=tuple(None if name is None else dims for name, dims in zip(op.outputs, outputs, strict=False)),
            linear=tuple(dict.fromkeys(members for members in linear if members and self._may_be_parts(members))),
            talks=tuple(talks),
            scratch=tuple(each for each in scratch if each.when and (each.times or each.traffic)),
        )

    def _may_be_parts(self, members: frozenset[int]) -> bool:
        """Floating-point, and all occurrences of a value: one that occurs twice among the inputs is partial in both places, so
        that x * x is not linear."""
        names = self.call.op.inputs
        alike = all((names[i] == names[j]) <= (j in members) for i in members for j in range(len(names)))
        return alike and all(self.call.dtypes[i] in REALS for i in members)


def stretched(shape: Sequence[int], dims: Dims) -> Dims:
    behind = dims[len(dims) - len(shape) :]
    return tuple(() if size == 1 else dim for size, dim in zip(shape, behind, strict=True))


def broadcast(shapes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The broadcast shape."""
    rank = max(map(len, shapes), default=0)
    wide = [(*[1] * (rank - len(shape)), *shape) for shape in shapes]
    return tuple(next((size for size in sizes if size != 1), 1) for sizes in zip(*wide, strict=True))
