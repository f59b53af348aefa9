"""The work of an operator on one device: what its seconds are predicted from, in a plan and in a rehearsal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from scrimp.capture import Op, Value
from scrimp.move import ITEMSIZE
from scrimp.planner.cost.operator_classes import class_of
from scrimp.planner.shard.placement import Placed


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
) -> OperatorWork | None:
    """None if the operator only makes views. `split_over`: the mesh axes that divide its arithmetic; `sizes`: of all axes."""
    made = [(name, place) for name, place in zip(op.outputs, outputs, strict=True) if name is not None and place is not None]
    written = [(name, place) for name, place in made if values[name].storage == name]
    if not written:
        return None
    touched = [*zip(op.inputs, inputs, strict=True), *written]
    dtype = values[next(name for name in (*op.outputs, *op.inputs) if name is not None)].dtype
    return OperatorWork(
        flops=op.flops / prod(sizes[axis] for axis in split_over),
        nbytes=sum(place.numel(sizes) * ITEMSIZE[values[name].dtype] for name, place in touched),
        dtype=dtype,
        operators=class_of(op),
    )
