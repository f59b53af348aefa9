"""The baselines on one mesh, for comparison and as warm starts of a search.

A search warm-started from their choices has them as its first incumbents. So its plan is never worse than the best of them,
whenever it is interrupted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from scrimp._arguments import KEEP, RECOMPUTE
from scrimp.errors import PlanError
from scrimp.layout import Mesh
from scrimp.planner.baselines.strategies import FULL, SELECTIVE, SHARED, SPLIT, Baseline
from scrimp.planner.cost.zero_levels import NOTHING, Precision
from scrimp.planner.formulation.assembly import Assembly
from scrimp.planner.formulation.on_mesh import OnMesh
from scrimp.planner.solver.evaluate import evaluate, held_nbytes
from scrimp.planner.solver.found import TIME_LIMIT
from scrimp.planner.solver.problem import Problem
from scrimp.planner.solver.solve import TIME, Solution, solve

GAP = 1e-4  # optimality gap for the time of whatever a baseline leaves open
SECONDS = 60.0  # time limit for that; it takes a fraction of one, since little is open


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """`assembly`: with the options of the baseline alone."""

    assembly: Assembly
    problem: Problem
    solution: Solution


class Known:
    """Baselines on a mesh. Those with the same splits share an assembly."""

    def __init__(self, on: OnMesh, precision: Precision, ways: Sequence[str] = (KEEP, RECOMPUTE)) -> None:
        self.on, self.precision = on, precision
        self.ways = tuple(way for way in (KEEP, RECOMPUTE) if way in ways)
        self._assemblies: dict[Baseline, tuple[Assembly, Problem]] = {}

    def drawn(self, baseline: Baseline, seconds: float = SECONDS) -> Drawn:
        """The baseline's problem and solution; `PlanError` if this model does not support it."""
        assembly, problem = self._assembly(baseline)
        problem = baseline.restrict(assembly, problem)
        return Drawn(assembly=assembly, problem=problem, solution=solve(problem, objective=TIME, seconds=seconds, gap=GAP))

    def every(self) -> Iterator[Drawn]:
        """All baselines that the model supports. Their ZeRO levels do not change how they split, so the splits are solved
        once."""
        for baseline in baselines_on(self.on.mesh):
            try:
                solved = self.drawn(baseline)
            except PlanError:
                continue
            assembly, problem = self._assembly(baseline)
            for shared in SHARED.values() if baseline.dp else (NOTHING,):
                try:
                    choice = replace(baseline, shared=shared).shared_out(assembly, solved.solution.choice)
                except PlanError:
                    continue
                yield Drawn(assembly=assembly, problem=problem, solution=evaluated(problem, choice, solved.solution))

    def _assembly(self, baseline: Baseline) -> tuple[Assembly, Problem]:
        alike = replace(baseline, shared=NOTHING, recompute=None)
        if alike not in self._assemblies:
            assembly = self.on.assembly(self.precision, self.ways, narrow=baseline.narrow)
            self._assemblies[alike] = assembly, assembly.sketch.problem()
        return self._assemblies[alike]


def evaluated(problem: Problem, choice: tuple[int, ...], like: Solution) -> Solution:
    """Evaluates a choice as a solution without proof."""
    peak, point, seconds, kinds = evaluate(problem, choice)
    phase = replace(like.phases[-1], value=seconds, bound=0.0, status=TIME_LIMIT)
    return replace(
        like, choice=choice, peak_nbytes=peak, point=point, seconds=seconds, kinds=tuple(kinds.items()),
        held_nbytes=held_nbytes(problem, choice), phases=(phase,),
    )  # fmt: skip


def baselines_on(mesh: Mesh) -> Iterator[Baseline]:
    """Data parallelism over all axes; and tensor parallelism over each of them, with data parallelism over the others. Their ZeRO
    level is left open."""
    for recompute in (None, FULL):
        yield Baseline(dp=mesh.names, recompute=recompute)
    for tp in mesh.names:
        dp = tuple(axis for axis in mesh.names if axis != tp)
        for recompute in (None, SELECTIVE, FULL):
            for sequence in dict.fromkeys(sequence for sequence, _ in SPLIT.values()):
                yield Baseline(dp=dp, tp=tp, sequence=sequence, recompute=recompute)
