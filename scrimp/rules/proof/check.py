"""Checks a sharding rule numerically: runs an operator unsharded; shards its operands by a rule and a choice, runs each member's
part, joins the results, and compares. All members are threads of this process, so that operators with internal communication
work."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from math import prod
from threading import Barrier, BrokenBarrierError
from typing import Any

import torch

from scrimp.capture import Named, Op, Value
from scrimp.layout import Layout, Mesh
from scrimp.rules.core.call import Call, bind, on_device, with_literals
from scrimp.rules.core.layouts import Split, Sums, factored_shape, faults, fits, layouts
from scrimp.rules.core.rule import Dims, Rule
from scrimp.rules.localized import localize
from scrimp.rules.ops.factories import EMPTY, RANDOM
from scrimp.rules.ops.registry import rule_of
from scrimp.rules.proof.random_inputs import sample

_PATIENCE_SECONDS = 60
_HIGH = "float64"
_NOT_HIGH = ("aten._grouped_mm.default",)  # which torch has only for lower precisions
_TOLERANCE = {"float64": 1e-9, "float32": 1e-4, "float16": 2e-2, "bfloat16": 1e-1}


def check(
    op: Op,
    values: Mapping[str, Value],
    split: Split,
    mesh: Mesh,
    *,
    rule: Rule | None = None,
    sums: Sums | None = None,
    seed: int = 0,
    floats: str = _HIGH,
    device: str = "cpu",
) -> list[str]:
    """The faults; empty if the rule (by default the operator's own) is right for this choice. All floating-point tensors get the
    dtype `floats`, whatever the values say: the check is of the split alone."""
    rule = rule or rule_of(op, values)
    floats = "float32" if floats == _HIGH and op.target in _NOT_HIGH else floats
    call = bind(_made_of(op, floats, device), values)
    if rule is None or call is None:
        return [f"{op.target} has no rule"]
    found = faults(rule, call.shapes, call.made)
    if found or not fits(rule, split, mesh):
        return found or [
            f"{op.target}: {dict(split)} does not divide the factors {[each.size for each in rule.factors]} on {mesh}"
        ]
    inputs = sample(call, seed=seed, floats=getattr(torch, floats), device=device)
    whole = call.run(call.filled([tensor.clone() for tensor in inputs]))
    before, after = layouts(rule, split, sums)
    parts = [
        _cut(tensor, rule, dims, layout, mesh, seed) for tensor, dims, layout in zip(inputs, rule.inputs, before, strict=True)
    ]
    try:
        made = _run_all(call.op, rule, split, mesh, parts, device)
    except Exception as error:  # the unsharded operator ran, so any error is the rule's
        return [f"{op.target}: a member failed: {error}"]
    joined: list[torch.Tensor | None] = []
    for index, (dims, layout) in enumerate(zip(rule.outputs, after, strict=True)):
        joined.append(None)
        if dims is None or layout is None:
            continue
        at = f"{op.target}, output {index}, layout {layout} on {mesh}"
        local = [outputs[index] for outputs in made]
        wrong, joined[index] = _join(local, rule, dims, layout, mesh, compare=op.target not in EMPTY)
        found += [f"{at}: {each}" for each in wrong]
        if not wrong and op.target not in EMPTY | RANDOM:
            found += [f"{at}: {each}" for each in _differences(joined[index], whole[index], floats)]
    return found or _drawn(call, inputs, joined)


def _made_of(op: Op, floats: str, device: str) -> Op:
    """The operator with the device and every floating-point dtype among its arguments replaced."""

    def changed(literal: Named) -> Named:
        is_float = literal.what == "dtype" and getattr(torch, literal.name).is_floating_point
        return replace(literal, name=floats) if is_float else literal

    return with_literals(on_device(op, device), changed)


def _cut(tensor: torch.Tensor, rule: Rule, dims: Dims, layout: Layout, mesh: Mesh, seed: int) -> list[torch.Tensor]:
    """The shard of each member."""
    shape, summands = factored_shape(rule, dims), prod(map(mesh.axis_size, layout.partial))
    noise = torch.Generator().manual_seed(seed + 1)
    pieces = [torch.randn(tensor.shape, generator=noise, dtype=torch.float64).to(tensor) for _ in range(summands - 1)]
    pieces.append(tensor - sum(pieces) if pieces else tensor)
    locals_ = []
    for rank in range(mesh.size):
        box = layout.tile(shape, mesh, rank)
        piece = pieces[_summand(layout, mesh, rank)].reshape(shape)[tuple(slice(*side) for side in box)]
        locals_.append(piece.reshape(_local_shape(dims, [stop - start for start, stop in box])).clone())
    return locals_


def _summand(layout: Layout, mesh: Mesh, rank: int) -> int:
    """The index of a member's summand."""
    place = 0
    for axis in layout.partial:
        place = place * mesh.axis_size(axis) + mesh.coordinate(rank, axis)
    return place


def _local_shape(dims: Dims, sizes: Sequence[int]) -> list[int]:
    left = list(sizes)
    return [prod(left.pop(0) for _ in range(max(1, len(dim)))) for dim in dims]


def _join(
    local: Sequence[Any], rule: Rule, dims: Dims, layout: Layout, mesh: Mesh, *, compare: bool
) -> tuple[list[str], torch.Tensor | None]:
    """Joins the shards, and lists faults: wrong shapes, or replicas that differ."""
    shape = factored_shape(rule, dims)
    held: dict[tuple[Any, int], torch.Tensor] = {}
    for rank, tensor in enumerate(local):
        box = layout.tile(shape, mesh, rank)
        wanted = _local_shape(dims, [stop - start for start, stop in box])
        if not isinstance(tensor, torch.Tensor) or list(tensor.shape) != wanted:
            return [f"member {rank} made {getattr(tensor, 'shape', tensor)}, not the shape {wanted}"], None
        key = (box, _summand(layout, mesh, rank))
        if compare and key in held and not torch.equal(held[key].nan_to_num(), tensor.nan_to_num()):
            return [f"member {rank} differs from another that should hold the same"], None
        held[key] = tensor
    whole = torch.zeros(shape, dtype=local[0].dtype, device=local[0].device)
    for (box, _), tensor in held.items():
        place = tuple(slice(*side) for side in box)
        part = tensor.reshape([stop - start for start, stop in box])
        whole[place] = part if not layout.partial else whole[place] + part
    return [], whole.reshape(_local_shape(dims, shape))


def _differences(got: torch.Tensor | None, wanted: Any, floats: str) -> list[str]:
    if got is None or got.shape != wanted.shape or got.dtype != wanted.dtype:
        return [f"made {None if got is None else (got.shape, got.dtype)}, wanted {wanted.shape, wanted.dtype}"]
    if not got.dtype.is_floating_point:
        return [] if torch.equal(got, wanted) else [f"{int((got != wanted).sum())} of {got.numel()} whole numbers differ"]
    scale = max(1.0, float(wanted.nan_to_num(0, 0, 0).abs().max()) if wanted.numel() else 1.0)
    if torch.allclose(got, wanted, rtol=0, atol=_TOLERANCE[floats] * scale, equal_nan=True):
        return []
    return [f"off by {float((got - wanted).abs().max()):.3g} where numbers are up to {scale:.3g}"]


def _drawn(call: Call, inputs: Sequence[torch.Tensor], joined: Sequence[torch.Tensor | None]) -> list[str]:
    """Dropout draws other numbers than the unsharded operator, but its result must follow from its own mask."""
    if call.op.target != "aten.native_dropout.default" or joined[0] is None or joined[1] is None:
        return []
    p = call.arguments["p"] if call.arguments["train"] is not False else 0.0
    wanted = inputs[0] * joined[1] * (1 / (1 - p) if p < 1 else 0)
    return _differences(joined[0], wanted, str(joined[0].dtype).removeprefix("torch."))


def _run_all(
    op: Op, rule: Rule, split: Split, mesh: Mesh, parts: Sequence[Sequence[torch.Tensor]], device: str
) -> list[tuple[Any, ...]]:
    meeting = _Meeting(mesh)

    def draw(coordinates: tuple[tuple[str, int], ...]) -> torch.Generator:
        seed = 17
        for axis, coordinate in coordinates:
            seed = seed * 1009 + mesh.names.index(axis.partition(".")[0]) * 31 + coordinate
        return torch.Generator(device).manual_seed(seed)

    def member(rank: int) -> tuple[Any, ...]:
        try:
            run = localize(op, rule, split, mesh, rank, all_reduce=meeting.all_reduce(rank), draw=draw)
            return run(*(each[rank] for each in parts))
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(mesh.size) as pool:
        running = [pool.submit(member, rank) for rank in range(mesh.size)]
        errors = [error for error in (each.exception() for each in running) if error is not None]
        for error in sorted(errors, key=lambda each: isinstance(each, BrokenBarrierError)):
            raise error
        return [each.result() for each in running]


class _Meeting:
    """All-reduces among threads: all members put their tensors, and then take their group's result."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh, self.barrier, self.table = mesh, Barrier(mesh.size), dict[int, torch.Tensor]()

    def all_reduce(self, rank: int) -> Callable[[torch.Tensor, str, tuple[str, ...]], torch.Tensor]:
        def reduce(tensor: torch.Tensor, how: str, axes: tuple[str, ...]) -> torch.Tensor:
            self.table[rank] = tensor
            self.barrier.wait(_PATIENCE_SECONDS)
            group = torch.stack([self.table[member] for member in self.mesh.group(rank, axes)])
            self.barrier.wait(_PATIENCE_SECONDS)
            return group.amax(0) if how == "max" else group.sum(0)

        return reduce
