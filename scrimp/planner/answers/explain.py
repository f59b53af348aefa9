"""`Plan.explain`: why a weight or an operator is sharded as it is, the next best choice, and that choice's price.

The solver runs again, for the same objective and within the same limit, with one choice forbidden; the difference is that
choice's price:

    split      the group must be split in another way
    saved      its saved activations must be treated in another way (keep, recompute, offload)
    at rest    its weights must be sharded in another way, while they are used or at rest

All other choices are free to change with it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from scrimp.errors import FitError, PlanError
from scrimp.ledger import format_nbytes
from scrimp.planner.answers.find import Where, find, main_op, ops_of, path_of
from scrimp.planner.answers.from_solution import level_of, option_of, planned_op, planned_weight
from scrimp.planner.answers.plan import Plan, PlannedOp, PlannedWeight, Schedule
from scrimp.planner.cost.zero_levels import levels
from scrimp.planner.formulation.assembly import Assembly
from scrimp.planner.solver.next_best import Forbidden, held_at, next_best
from scrimp.planner.solver.problem import Problem
from scrimp.planner.solver.solve import TIME, Solution, solve

SPLIT, SAVED, AT_REST = "split", "saved", "at rest"
GAP = 1e-3  # relative optimality gap for the next best choice
MORE = 0.01  # part of the peak over which the price of a byte is taken where the linear program has no dual price

LOADED = "this plan was loaded from a file, which does not hold the model: plan again, then call explain"
_UNITS = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))


@dataclass(frozen=True, kw_only=True)
class NextBest:
    """`peak_nbytes` and `seconds`: difference to the plan, negative if less. `others`: how many other choices change with it.
    `gap`: optimality gap of this solve, relative to the whole plan's objective."""

    chosen: tuple[str, ...]
    peak_nbytes: int
    seconds: float
    others: int
    gap: float

    @property
    def is_better(self) -> bool:
        """Whether it beats the plan, which is optimal only up to its own gap."""
        return self.peak_nbytes <= 0 and self.seconds <= 0 and (self.peak_nbytes, self.seconds) != (0, 0)

    def __str__(self) -> str:
        changes = f"; {self.others} other choice{'s' if self.others > 1 else ''} change{'' if self.others > 1 else 's'}"
        better = "; better, because the plan is optimal only up to its gap" if self.is_better else ""
        sure = f"; optimality gap {self.gap:.1%} when the time was up" if self.gap > GAP else ""
        price = f"{_more_nbytes(self.peak_nbytes)}, {_more_seconds(self.seconds)}"
        return f"{'; '.join(self.chosen)}: {price}{changes if self.others else ''}{better}{sure}"


@dataclass(frozen=True, kw_only=True)
class Choice:
    """`what`: "split", "saved" or "at rest". `next_best`: None if there is none; `why_none` then tells why."""

    what: str
    chosen: tuple[str, ...]
    next_best: NextBest | None
    why_none: str = ""


@dataclass(frozen=True, kw_only=True)
class GroupExplained:
    """Operators that share one split. `layers`: those that choose together. `held`: bytes of all these layers at the peak, by
    kind; `copies_nbytes`: of resharded copies between this group and others at the peak."""

    name: str
    layers: tuple[str, ...]
    choices: tuple[Choice, ...]
    held: tuple[tuple[str, int], ...]
    copies_nbytes: int


@dataclass(frozen=True, kw_only=True)
class _Source:
    """The problem and its solution for one pipeline stage."""

    assembly: Assembly
    problem: Problem
    solution: Solution
    near: bool = False


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """`seconds_per_byte`: step time saved by one more byte, from the linear program's dual price; or, where that has none since
    no plan needs less memory, from the fastest plan with `over_nbytes` more."""

    name: str
    mesh: str
    where: str
    peak_nbytes: int
    seconds_per_byte: float
    over_nbytes: int
    groups: tuple[GroupExplained, ...]
    near: bool = False

    def __str__(self) -> str:
        return self.text()

    def text(self) -> str:
        lines = [f"{self.name}, on the mesh {self.mesh}"]
        for group in self.groups:
            lines += ["", f"{group.name}", f"  layers     {_span(group.layers)}"]
            for choice in group.choices:
                lines += [f"  {choice.what if k == 0 else '':<10} {words}" for k, words in enumerate(choice.chosen)]
                lines.append(f"    or else  {choice.next_best or choice.why_none}")
            held = [f"{kind} {format_nbytes(nbytes)}" for kind, nbytes in group.held]
            held += [f"copies from and to others {format_nbytes(group.copies_nbytes)}"] if group.copies_nbytes else []
            lines.append(f"  at peak    {', '.join(held) or 'nothing'}")
        unit, size = next(((unit, size) for unit, size in _UNITS if self.peak_nbytes >= size), _UNITS[-1])
        rate = f"{_seconds(self.seconds_per_byte * size)} a step for each {unit}"
        over = f"The next {format_nbytes(self.over_nbytes)} save at least {rate}" if self.over_nbytes else f"More saves {rate}"
        lines += [
            "",
            f"The peak is {format_nbytes(self.peak_nbytes)}, at {self.where}.",
            f"{over}." if self.seconds_per_byte else "More saves no time.",
            *(["The next best is from the options that were searched: there are too many for all."] if self.near else []),
        ]
        return "\n".join(lines)


def explain(plan: Plan, name: str, *, seconds: float) -> Explanation:
    if plan.schedule is not None:
        return _in_its_stage(plan, plan.schedule, name, seconds)
    if plan.source is None:
        raise PlanError(LOADED)
    assembly, solution = plan.source.assembly, plan.source.solution
    found = find(assembly, name)
    end = time.monotonic() + seconds
    asking = [(where, what) for where in found for what in _names(assembly, where)]
    price, over = _price(plan, seconds / 4)
    results: dict[Where, list[Choice]] = {where: [] for where in found}
    for k, (where, what) in enumerate(asking):
        left = end - time.monotonic()
        results[where].append(_choice(plan, where, what, left / (len(asking) - k)))
    return Explanation(
        name=name,
        mesh=str(plan.mesh),
        where=plan.memory.where,
        peak_nbytes=solution.peak_nbytes,
        seconds_per_byte=price,
        over_nbytes=over,
        groups=tuple(_group(plan, where, tuple(choices)) for where, choices in results.items()),
        near=plan.source.near,
    )


def _in_its_stage(plan: Plan, schedule: Schedule, name: str, seconds: float) -> Explanation:
    """Explains within the stage that holds `name`: each stage is a problem of its own."""
    trouble: PlanError | None = None
    for stage in schedule.stages:
        if stage.source is None:
            raise PlanError(LOADED)
        one, solution = stage.source
        if len(one.assemblies) > 1:
            raise PlanError("explain does not support interleaved pipelines: this plan has several model chunks on a device")
        source = _Source(assembly=one.assemblies[0], problem=one.problem, solution=solution)
        try:
            find(source.assembly, name)
        except PlanError as error:
            trouble = trouble or error
            continue
        return explain(replace(plan, schedule=None, memory=stage.memory, source=source), name, seconds=seconds)
    assert trouble is not None
    raise trouble


def _price(plan: Plan, seconds: float) -> tuple[float, int]:
    """Seconds saved per byte, and over how many bytes that was taken. A plan of minimal memory has no dual price: no plan exists
    with fewer bytes."""
    source = plan.source
    if source.solution.seconds_per_byte or plan.objective == TIME:
        return source.solution.seconds_per_byte, 0
    over = max(int(MORE * source.solution.peak_nbytes), 1)
    problem = replace(source.problem, limit_nbytes=source.solution.peak_nbytes + over)
    faster = solve(problem, objective=TIME, seconds=seconds, gap=GAP, warm=source.solution.choice)
    return (source.solution.seconds - faster.seconds) / over, over


def _names(assembly: Assembly, where: Where) -> list[str]:
    several = len(assembly.ways[where].names) > 1
    return [SPLIT, *([SAVED] if several else []), *([AT_REST] if where in assembly.rest else [])]


def _group(plan: Plan, where: Where, choices: tuple[Choice, ...]) -> GroupExplained:
    assembly, solution, problem = plan.source.assembly, plan.source.solution, plan.source.problem
    part = assembly.parts[where[0]]
    nodes = [assembly.nodes[where], *([assembly.rest[where]] if where in assembly.rest else [])]
    own, copies = held_at(problem, solution.choice, solution.point, nodes)
    targets = dict.fromkeys(_short(op.target) for op in ops_of(assembly, where))
    return GroupExplained(
        name=f"{path_of(assembly.graph, part.first, main_op(assembly, where)) or 'the model'}: {', '.join(targets)}",
        layers=tuple(assembly.graph.layers[index].path or "the model" for index in range(part.first, part.last + 1)),
        choices=choices,
        held=tuple(own.items()),
        copies_nbytes=copies,
    )


def _choice(plan: Plan, where: Where, what: str, seconds: float) -> Choice:
    source, choice = plan.source, plan.source.solution.choice
    chosen = _words(source.assembly, where, what, choice)
    if seconds <= 0:
        return Choice(what=what, chosen=chosen, next_best=None, why_none="not searched: the time was up")
    forbidden = _forbidden(source.assembly, where, what, choice)
    try:
        other = next_best(source.problem, choice, forbidden, objective=plan.objective, seconds=seconds, gap=GAP)
    except FitError as error:
        more = f": that takes {format_nbytes(error.least_nbytes)}" if error.least_nbytes is not None else ""
        limit = format_nbytes(source.problem.limit_nbytes or 0)
        return Choice(what=what, chosen=chosen, next_best=None, why_none=f"nothing else fits within {limit}{more}")
    if other is None:
        return Choice(what=what, chosen=chosen, next_best=None, why_none="nothing: there is no other way")
    nodes = {*forbidden.nodes}
    best = NextBest(
        chosen=_words(source.assembly, where, what, other.choice),
        peak_nbytes=other.peak_nbytes - source.solution.peak_nbytes,
        seconds=other.seconds - source.solution.seconds,
        others=sum(a != b for k, (a, b) in enumerate(zip(choice, other.choice, strict=True)) if k not in nodes),
        gap=other.gap,
    )
    return Choice(what=what, chosen=chosen, next_best=best)


def _forbidden(assembly: Assembly, where: Where, what: str, choice: Sequence[int]) -> Forbidden:
    """All options equivalent to the chosen one."""
    node, ways = assembly.nodes[where], assembly.ways[where]
    options = range(len(assembly.parts[where[0]].model.options[where[1]]) * len(ways.names))
    if what == SPLIT:
        return Forbidden(options={node: {p for p in options if ways.split_of(p) == ways.split_of(choice[node])}}, pairs={})
    if what == SAVED:
        return Forbidden(options={node: {p for p in options if ways.way_of(p) == ways.way_of(choice[node])}}, pairs={})
    rest = assembly.rest[where]
    now = _weights(assembly, where, choice)
    tried = list(choice)
    pairs = set()
    for p in options:
        for q in range(len(levels(assembly.moves.mesh, assembly.precision))):
            tried[node], tried[rest] = p, q
            if _weights(assembly, where, tried) == now:
                pairs.add((p, q))
    return Forbidden(options={}, pairs={(node, rest): pairs})


def _words(assembly: Assembly, where: Where, what: str, choice: Sequence[int]) -> tuple[str, ...]:
    option, way = option_of(assembly, *where, choice)
    if what == SAVED:
        return (way,)
    if what == AT_REST:
        return tuple(f"{weight.name} {weight}" for weight in _weights(assembly, where, choice))
    sizes = assembly.parts[where[0]].model.groups[where[1]].sizes
    cuts = [
        f"{axis} cuts {'nothing' if atom is None else sizes[atom]}"
        for axis, atom in zip(assembly.moves.mesh.names, option.split, strict=True)
    ]
    return (f"{_op_words(planned_op(main_op(assembly, where), option, way))} ({', '.join(cuts)})",)


def _weights(assembly: Assembly, where: Where, choice: Sequence[int]) -> tuple[PlannedWeight, ...]:
    """The weights whose sharding at rest this group chooses."""
    model = assembly.parts[where[0]].model
    named = dict(assembly.graph.layers[assembly.parts[where[0]].first].parameters)
    option, _ = option_of(assembly, *where, choice)
    level = level_of(assembly, *where, choice)
    return tuple(
        planned_weight(named[name], option.needed[name], assembly.moves.mesh, level)
        for name in model.weights
        if model.uses[name][0].group == where[1] and assembly.owners[named[name]] == (where[0], name)
    )


def _op_words(op: PlannedOp) -> str:
    return f"{_short(op.target)} {' '.join(op.inputs)} -> {' '.join(layout or 'unused' for layout in op.outputs)}"


def _short(target: str) -> str:
    return target.removeprefix("aten.").partition(".")[0]


def _span(layers: Sequence[str]) -> str:
    few = layers if len(layers) <= 3 else (*layers[:2], "...", layers[-1])
    return f"{', '.join(few)}{f': {len(layers)} that choose together' if len(layers) > 1 else ''}"


def _more_nbytes(nbytes: int) -> str:
    return f"{format_nbytes(abs(nbytes))} {'more' if nbytes > 0 else 'less'} at the peak" if nbytes else "the same peak"


def _more_seconds(seconds: float) -> str:
    return f"{_seconds(abs(seconds))} {'more' if seconds > 0 else 'less'} a step" if seconds else "the same time"


def _seconds(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.2g} s"
