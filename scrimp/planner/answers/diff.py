"""`Plan.diff`: compares two plans' settings, memory and time, and layer by layer their sharding choices.

Two plans of one model may group its layers differently. So layers are compared one by one, by position in the forward, and
neighbours that differ in the same way are reported once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from scrimp.cluster import Cluster
from scrimp.ledger import format_nbytes
from scrimp.planner.answers.plan import Plan, PlannedLayers, PlannedOp

FIGURE, WEIGHT, SAVED, LAYOUT = "figure", "weight", "saved", "layout"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One difference. `kind`: "figure" (of the whole plan), "weight" (`what` is its name in its layer), "saved" (keep, recompute
    or offload), "layout" (of an operator's tensors). `one`, `other`: empty where that plan lacks the item."""

    kind: str
    what: str
    one: str
    other: str
    more: str = ""  # the change from `one` to `other`, for numbers


@dataclass(frozen=True, kw_only=True)
class LayersDiffer:
    """`count` consecutive layers from `first` on that differ in the same way."""

    path: str
    first: int
    count: int
    rows: tuple[Row, ...]

    @property
    def title(self) -> str:
        return f"{self.path or 'the model'}{f' and {self.count - 1} more' if self.count > 1 else ''}"


@dataclass(frozen=True, kw_only=True)
class Difference:
    """All differences between two plans; falsy if there are none."""

    figures: tuple[Row, ...]
    layers: tuple[LayersDiffer, ...]

    def __bool__(self) -> bool:
        return bool(self.figures or self.layers)

    def __str__(self) -> str:
        return self.text()

    def text(self) -> str:
        if not self:
            return "no difference"
        lines = [*_figure_lines(self.figures)]
        for layers in self.layers:
            lines += [layers.title, *_layer_lines(layers.rows)]
        return "\n".join(lines)


def diff(one: Plan, other: Plan) -> Difference:
    return Difference(figures=tuple(_figures(one, other)), layers=tuple(_layers(one, other)))


def _figures(one: Plan, other: Plan) -> Iterator[Row]:
    def row(what: str, a: str, b: str, more: str = "") -> Row:
        return Row(kind=FIGURE, what=what, one=a, other=b, more=more)

    def nbytes(what: str, a: int, b: int) -> Iterator[Row]:
        if a != b:
            yield row(what, format_nbytes(a), format_nbytes(b), f"{'+' if b > a else '-'}{format_nbytes(abs(b - a))}")

    if one.cluster != other.cluster:
        yield row("cluster", *_clusters(one, other))
    for what, a, b in (
        ("mesh", str(one.mesh), str(other.mesh)),
        ("objective", one.objective, other.objective),
        ("precision", one.precision, other.precision),
        ("optimizer", one.optimizer, other.optimizer),
        ("layers", str(_count(one)), str(_count(other))),
    ):
        if a != b:
            yield row(what, a, b)
    yield from nbytes("peak", one.memory.peak_nbytes, other.memory.peak_nbytes)
    kinds = [{kind.kind: kind.nbytes for kind in plan.memory.kinds} for plan in (one, other)]
    for kind in dict.fromkeys([*kinds[0], *kinds[1]]):
        yield from nbytes(f"  {kind}", kinds[0].get(kind, 0), kinds[1].get(kind, 0))
    yield from nbytes("reserved beside it", *(sum(part.nbytes for part in each.beside if each.reserve) for each in (one, other)))
    if one.memory.where != other.memory.where:
        yield row("  it is at", one.memory.where, other.memory.where)
    if one.seconds != other.seconds:
        part = f" ({other.seconds / one.seconds - 1:+.1%})" if one.seconds else ""
        yield row("step", f"{one.seconds:.4g} s", f"{other.seconds:.4g} s", f"{other.seconds - one.seconds:+.3g} s{part}")


def _clusters(one: Plan, other: Plan) -> tuple[str, str]:
    names = [_cluster_name(plan) for plan in (one, other)]
    return (names[0], names[1]) if names[0] != names[1] else (names[0], f"{names[1]}, with other figures")


def _cluster_name(plan: Plan) -> str:
    hardware = Cluster.from_json(plan.cluster).hardware
    return "a cluster without device data" if hardware is None else f"{hardware.devices}x{hardware.kind}"


def _layers(one: Plan, other: Plan) -> Iterator[LayersDiffer]:
    if _count(one) != _count(other):
        return  # plans of different models: their layers cannot be compared
    found: LayersDiffer | None = None
    for first, last in pairwise(sorted({*_borders(one), *_borders(other)})):
        a, b = _at(one, first), _at(other, first)
        rows = tuple(_rows(a, b))
        if found is not None and rows == found.rows and found.first + found.count == first:
            found = LayersDiffer(path=found.path, first=found.first, count=found.count + last - first, rows=rows)
            continue
        if found is not None and found.rows:
            yield found
        path = a.path if a.first == first else b.path
        found = LayersDiffer(path=path, first=first, count=last - first, rows=rows)
    if found is not None and found.rows:
        yield found


def _count(plan: Plan) -> int:
    return sum(layers.count for layers in plan.layers)


def _borders(plan: Plan) -> Iterator[int]:
    yield _count(plan)
    yield from (layers.first for layers in plan.layers)


def _at(plan: Plan, layer: int) -> PlannedLayers:
    return next(layers for layers in plan.layers if layers.first <= layer < layers.first + layers.count)


def _rows(a: PlannedLayers, b: PlannedLayers) -> Iterator[Row]:
    weights = [{weight.name.removeprefix(f"{layers.path}."): weight for weight in layers.weights} for layers in (a, b)]
    for name in dict.fromkeys([*weights[0], *weights[1]]):
        texts = [str(each[name]) if name in each else "" for each in weights]
        if texts[0] != texts[1]:
            yield Row(kind=WEIGHT, what=name, one=texts[0], other=texts[1])
    ops = [{op.name: op for op in layers.ops} for layers in (a, b)]
    for name in dict.fromkeys([*ops[0], *ops[1]]):
        pair = [each.get(name) for each in ops]
        what = next(op.target for op in pair if op is not None)
        for kind, of in ((SAVED, _saved), (LAYOUT, _layouts)):
            texts = ["" if op is None else of(op) for op in pair]
            if texts[0] != texts[1]:
                yield Row(kind=kind, what=what, one=texts[0], other=texts[1])


def _saved(op: PlannedOp) -> str:
    return op.saved


def _layouts(op: PlannedOp) -> str:
    return f"{' '.join(op.inputs)} -> {' '.join(layout or 'unused' for layout in op.outputs)}"


def _figure_lines(rows: Sequence[Row]) -> Iterator[str]:
    width = max((len(row.what) for row in rows), default=0)
    for row in rows:
        yield f"{row.what:<{width}}  {row.one} -> {row.other}{f'  {row.more}' if row.more else ''}"


def _layer_lines(rows: Sequence[Row]) -> Iterator[str]:
    """Reports equal changes once; operators are counted, because a layer has about a hundred."""
    alike: dict[tuple[str, str, str], list[str]] = {}
    for row in rows:
        change = ("", "") if row.kind == LAYOUT else (row.one or "none", row.other or "none")
        alike.setdefault((row.kind, *change), []).append(row.what)
    for kind in (WEIGHT, SAVED, LAYOUT):
        for (of, one, other), names in alike.items():
            if of != kind:
                continue
            if kind == WEIGHT:
                yield f"  {one} -> {other}: {', '.join(names)}"
                continue
            many = f"{len(names)} operator{'s' if len(names) > 1 else ''}"
            few = ", ".join(dict.fromkeys(name.removeprefix("aten.").partition(".")[0] for name in names))
            yield f"  {one} -> {other}: what {many} save ({few})" if kind == SAVED else f"  split otherwise: {many} ({few})"
