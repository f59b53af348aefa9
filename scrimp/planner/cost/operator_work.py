"""The work of an operator on one device: what its seconds are predicted from, in a plan and in a rehearsal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from scrimp.capture import Op, Value
from scrimp.move import ITEMSIZE
from scrimp.planner.cost.operator_classes import class_of
from scrimp.planner.shard.placement import Placed

LOOKUP, SOFTMAX, REDUCTION, POINTWISE = "lookup", "softmax", "reduction", "pointwise"
ADDS_ROWS = "aten.embedding_dense_backward.default"
# Operators that read few elements of an input: a lookup as many as it writes, the loss of labels next to none.
FEW = {
    "aten.embedding.default": 0, "aten.index.Tensor": 0, "aten._unsafe_index.Tensor": 0, "aten.index_select.default": 0,
    "aten.gather.default": 0, "aten.nll_loss_forward.default": 0, "aten.nll_loss2d_forward.default": 0,
    "aten.nll_loss_backward.default": 1, "aten.nll_loss2d_backward.default": 1,
}  # fmt: skip


@dataclass(frozen=True)
class OperatorWork:
    """`nbytes`: read and written; `operators`: one of `scrimp.cluster.CLASSES`."""

    flops: float
    nbytes: float
    dtype: str
    operators: str


def work_of(
    op: Op,
    values: Mapping[str, Value],
    inputs: Sequence[Placed],
    outputs: Sequence[Placed | None],
    split_over: Sequence[str],
    sizes: Mapping[str, int],
    besides_nbytes: int = 0,
) -> tuple[OperatorWork, ...]:
    """In parts that follow each other: mostly one, none if the operator only makes views. `split_over`: the mesh axes that divide
    its arithmetic; `sizes`: of all axes. `besides_nbytes`: read and written beyond inputs and outputs, because it is split."""
    made = [(name, place) for name, place in zip(op.outputs, outputs, strict=True) if name is not None and place is not None]
    written = [(name, place) for name, place in made if values[name].storage == name]
    if not written:
        return ()
    dtype = values[next(name for name in (*op.outputs, *op.inputs) if name is not None)].dtype
    operators = class_of(op, values)
    unread = FEW.get(op.target)

    def nbytes(pairs: Sequence[tuple[str, Placed]]) -> int:
        return sum(place.numel(sizes) * ITEMSIZE[values[name].dtype] for name, place in pairs)

    read = nbytes([pair for k, pair in enumerate(zip(op.inputs, inputs, strict=True)) if k != unread])
    if op.target == ADDS_ROWS:  # to a table of zeros
        return OperatorWork(0.0, 2 * read, dtype, operators), OperatorWork(0.0, nbytes(written), dtype, POINTWISE)
    times = 2 if unread is not None and operators == LOOKUP else 1
    flops = op.flops / prod(sizes[axis] for axis in split_over)
    if operators == SOFTMAX and besides_nbytes:  # in place of one kernel reductions and more, about as fast as reductions
        return (OperatorWork(flops, read + nbytes(written) + besides_nbytes, dtype, REDUCTION),)
    own = OperatorWork(flops, read + times * nbytes(written), dtype, operators)
    return (own, OperatorWork(0.0, besides_nbytes, dtype, POINTWISE)) if besides_nbytes else (own,)
