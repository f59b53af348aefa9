"""ZeRO levels: over which axes weights, gradients and optimizer states are sharded at rest, beyond their sharding in use.

An axis along which a group's weights are replicated can shard nothing (0), the optimizer states (1), the gradients too (2), or
the weights too (3), which are then gathered whenever they are used. Data parallelism is 0 everywhere, and ZeRO 1, 2 and 3 are
these numbers; here every group and every axis has its own.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from math import prod

from scrimp.layout import Layout, Mesh
from scrimp.planner.cost.greedy_move import AxisWise

NOTHING, STATES, GRADIENTS, WEIGHTS = range(4)
UPDATE_NBYTES = 28  # read and written per parameter by an update: see docs/explanation/chunks.md, "On the host"


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Bytes per parameter: its weight, its gradient (0: it replaces the weight in place), and its optimizer states."""

    name: str
    dtype: str
    weight: int
    gradient: int
    reduced: int  # bytes of a gradient's element in a reduction
    states: int


OPTIMIZERS = {"adamw": 8, "sgd": 4}  # bytes of moments for each parameter
PRECISIONS = ("bf16", "megatron-bf16", "fp32")


def precision_of(name: str, optimizer: str) -> Precision | None:
    """None if one of the names is unknown."""
    moments = OPTIMIZERS.get(optimizer)
    if moments is None:
        return None
    return {
        "bf16": Precision(name=name, dtype="bfloat16", weight=2, gradient=0, reduced=2, states=4 + moments),
        "megatron-bf16": Precision(name=name, dtype="bfloat16", weight=2, gradient=4, reduced=4, states=4 + moments),
        "fp32": Precision(name=name, dtype="float32", weight=4, gradient=4, reduced=4, states=moments),
    }.get(name)


@dataclass(frozen=True, kw_only=True)
class Used:
    """A weight in use: elements on a device, axes along which it is replicated, and axes along which its gradient is a partial
    sum."""

    numel: int
    same: tuple[str, ...]
    summed: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class AtRest:
    """Costs of a group's weights on a device. `gathered_nbytes`: while they are used, if they are sharded; `gather_seconds`: of
    one all-gather; `reduce_seconds`: of reducing a micro-batch's gradient; `seconds`: once in a step."""

    weight_nbytes: int
    gradient_nbytes: int
    state_nbytes: int
    gathered_nbytes: int
    gather_seconds: float
    reduce_seconds: float
    seconds: float


def levels(mesh: Mesh, precision: Precision) -> tuple[tuple[int, ...], ...]:
    """All combinations of levels, one per axis; level 2 is left out where gradients take no memory of their own."""
    each = (NOTHING, STATES, GRADIENTS, WEIGHTS) if precision.gradient else (NOTHING, STATES, WEIGHTS)
    return tuple(product(each, repeat=len(mesh.axes)))


def axes_at_rest(used: Collection[str], level: tuple[int, ...], mesh: Mesh) -> dict[int, tuple[str, ...]]:
    """By `STATES`, `GRADIENTS` and `WEIGHTS`: the axes over which each is sharded beyond those that split the weight in use."""
    return {
        least: tuple(axis for axis, each in zip(mesh.names, level, strict=True) if axis not in used and each >= least)
        for least in (STATES, GRADIENTS, WEIGHTS)
    }


@lru_cache(maxsize=1 << 16)  # identical layers share results
def at_rest(
    used: tuple[Used, ...],
    level: tuple[int, ...],
    costs: AxisWise,
    precision: Precision,
    rate: float,
    *,
    trained: bool = True,
    accumulated: bool = False,
) -> AtRest:
    """`rate`: bytes per second of the device's memory. Weights are gathered before the forward and before the backward. Gradients
    are reduced to the shards of the states, at once; or, if `accumulated` over micro-batches, first to the shards of the sum.
    Unsharded weights are gathered after the update."""
    mesh = costs.mesh
    chosen = dict(zip(mesh.names, level, strict=True))
    sizes = dict(mesh.axes)
    weight = gradient = state = gathered = 0
    seconds = gather_seconds = reduce_seconds = 0.0
    for one in used:
        over = {least: tuple(axis for axis in one.same if chosen[axis] >= least) for least in (STATES, GRADIENTS, WEIGHTS)}
        share = {least: -(-one.numel // prod(sizes[axis] for axis in axes)) for least, axes in over.items()}
        weight += share[WEIGHTS] * precision.weight
        whole, shared = Layout(dims=((),)), Layout(dims=(over[WEIGHTS],))
        if over[WEIGHTS]:
            gathered += one.numel * precision.weight
            gather_seconds += costs.seconds(one.numel * precision.weight, shared, whole)
        if not trained:
            continue
        gradient += share[GRADIENTS] * precision.gradient
        state += share[STATES] * precision.states
        kept = over[GRADIENTS] if accumulated else ()
        first = tuple(axis for axis in one.summed if axis in kept)
        reduce_seconds += costs.seconds(one.numel * precision.reduced, _parts(first), Layout(dims=(kept,)))
        rest = tuple(axis for axis in one.summed if axis not in kept)
        last = Layout(dims=(tuple(axis for axis in over[STATES] if axis not in kept),))
        seconds += costs.seconds(one.numel * precision.reduced / prod(sizes[axis] for axis in kept), _parts(rest), last)
        seconds += costs.seconds(one.numel * precision.weight, Layout(dims=(over[STATES],)), shared)
        seconds += share[STATES] * UPDATE_NBYTES / rate
    return AtRest(
        weight_nbytes=weight, gradient_nbytes=gradient, state_nbytes=state, gathered_nbytes=gathered,
        gather_seconds=gather_seconds, reduce_seconds=reduce_seconds, seconds=seconds,
    )  # fmt: skip


def _parts(partial: tuple[str, ...]) -> Layout:
    return Layout(dims=((),), partial=partial)


def accumulating(precision: Precision) -> Precision:
    """With more than one micro-batch the weights are needed after the first gradients: so gradients get memory of their own."""
    return replace(precision, gradient=precision.gradient or precision.reduced)
