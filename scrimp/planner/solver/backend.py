"""The LP and MIP solvers: HiGHS through highspy, or, where that is missing, the HiGHS within scipy, which takes no warm start.
Both run on one thread with a fixed seed: the same program gives the same solution."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from scrimp.errors import PlanError
from scrimp.planner.solver.model import Program
from scrimp.planner.solver.points import Numbers

HIGHS, SCIPY = "highspy", "scipy"
_TOLERANCE = 1e-9
OPTIMAL, INFEASIBLE, STOPPED = "optimal", "infeasible", "stopped"

Watch = Callable[[float, float], None]  # called for each new incumbent with its value and the bound


@dataclass(frozen=True, kw_only=True)
class Result:
    """`values`: of the incumbent, if there is one. `bound`: the proven lower bound. `reduced`: reduced cost by variable, of a
    linear program."""

    status: str
    values: Numbers | None
    bound: float
    reduced: Numbers | None = None


def solver_name() -> str:
    """The name of the installed solver."""
    for name in (HIGHS, SCIPY):
        if importlib.util.find_spec(name) is not None:
            return name
    raise PlanError("planning needs a solver, and none is installed: pip install highspy (or scipy)")


def minimise(
    program: Program,
    *,
    whole: bool,
    seconds: float,
    gap: float = 0.0,
    start: Numbers | None = None,
    watch: Watch | None = None,
    solver: str | None = None,
) -> Result:
    """Minimises the program. `whole=False`: solves the linear relaxation."""
    if (solver or solver_name()) == HIGHS:
        return _highspy(program, whole, seconds, gap, start, watch)
    return _scipy(program, whole, seconds, gap)


def _highspy(program: Program, whole: bool, seconds: float, gap: float, start: Numbers | None, watch: Watch | None) -> Result:
    highspy: Any = importlib.import_module("highspy")
    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = len(program.cost), len(program.rows_lower)
    lp.col_cost_, lp.col_lower_, lp.col_upper_ = program.cost, program.lower, program.upper
    lp.row_lower_, lp.row_upper_ = program.rows_lower, program.rows_upper
    lp.a_matrix_.format_ = highspy.MatrixFormat.kColwise
    lp.a_matrix_.start_, lp.a_matrix_.index_, lp.a_matrix_.value_ = program.start, program.index, program.value
    if whole:
        kinds = highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger
        lp.integrality_ = [kinds[int(each)] for each in program.whole]
    # All HiGHS solvers of a process share threads: after one with more threads (not ours), one with 1 would hang.
    highspy.Highs.resetGlobalScheduler(True)
    highs = highspy.Highs()
    highs.silent()
    options = {
        "threads": 1, "parallel": "off", "random_seed": 0, "time_limit": max(seconds, 0.01), "mip_rel_gap": gap,
        "mip_abs_gap": _TOLERANCE, "mip_feasibility_tolerance": _TOLERANCE, "primal_feasibility_tolerance": _TOLERANCE,
        "dual_feasibility_tolerance": _TOLERANCE,
    }  # fmt: skip
    for name, value in options.items():
        highs.setOptionValue(name, value)
    highs.passModel(lp)
    if whole and watch is not None:
        seen = watch
        highs.cbMipImprovingSolution.subscribe(
            lambda event: seen(event.data_out.objective_function_value, event.data_out.mip_dual_bound)
        )
    statuses = highspy.HighsModelStatus
    broken = statuses.kNotset, statuses.kLoadError, statuses.kModelError, statuses.kPresolveError, statuses.kSolveError
    # Linear programs of ours are solved twice as fast as they are. Where a limit leaves hardly any room, one of the two may fail.
    for presolve in ("choose", "off") if whole else ("off", "choose"):
        highs.setOptionValue("presolve", presolve)
        highs.clearSolver()
        if whole and start is not None:
            solution = highspy.HighsSolution()
            solution.col_value = start
            highs.setSolution(solution)
        highs.run()
        status, info, found = highs.getModelStatus(), highs.getInfo(), highs.getSolution()
        if status not in broken:
            break
    else:
        size = f"{len(program.cost)} variables and {len(program.rows_lower)} rows"
        raise PlanError(
            f"HiGHS {highs.version()} cannot solve a program of {size}: {highs.modelStatusToString(status)}. Numbers go up to "
            f"{np.abs(program.value).max(initial=0.0):.3g}; are some of the problem's bytes or seconds out of all proportion?"
        )
    if status in (statuses.kInfeasible, statuses.kUnboundedOrInfeasible):
        return Result(status=INFEASIBLE, values=None, bound=np.inf)
    optimal = status == statuses.kOptimal
    feasible = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
    values = np.array(found.col_value) if feasible else None
    if whole:
        return Result(status=OPTIMAL if optimal else STOPPED, values=values, bound=info.mip_dual_bound)
    bound = info.objective_function_value if optimal else -np.inf
    return Result(status=OPTIMAL if optimal else STOPPED, values=values, bound=bound, reduced=np.array(found.col_dual))


def _scipy(program: Program, whole: bool, seconds: float, gap: float) -> Result:
    optimize: Any = importlib.import_module("scipy.optimize")
    sparse: Any = importlib.import_module("scipy.sparse")
    shape = len(program.rows_lower), len(program.cost)
    matrix = sparse.csc_matrix((program.value, program.index, program.start), shape=shape)
    if whole:
        got = optimize.milp(
            program.cost,
            integrality=program.whole.astype(int),
            bounds=optimize.Bounds(program.lower, program.upper),
            constraints=optimize.LinearConstraint(matrix, program.rows_lower, program.rows_upper),
            options={"time_limit": max(seconds, 0.01), "mip_rel_gap": gap},
        )
        status = {0: OPTIMAL, 2: INFEASIBLE}.get(got.status, STOPPED)
        bound = got.mip_dual_bound if got.mip_dual_bound is not None else np.inf if status == INFEASIBLE else -np.inf
        return Result(status=status, values=got.x, bound=bound)
    equal = program.rows_lower == program.rows_upper
    below = ~equal & np.isfinite(program.rows_upper)
    rows = sparse.csr_matrix(matrix)
    got = optimize.linprog(
        program.cost,
        A_ub=rows[below],
        b_ub=program.rows_upper[below],
        A_eq=rows[equal],
        b_eq=program.rows_upper[equal],
        bounds=np.column_stack([program.lower, program.upper]),
        options={
            "time_limit": max(seconds, 0.01),
            "primal_feasibility_tolerance": _TOLERANCE,
            "dual_feasibility_tolerance": _TOLERANCE,
        },
    )
    if got.status == 2:
        return Result(status=INFEASIBLE, values=None, bound=np.inf)
    if got.status != 0:
        return Result(status=STOPPED, values=None, bound=-np.inf)
    return Result(status=OPTIMAL, values=got.x, bound=got.fun, reduced=got.lower.marginals + got.upper.marginals)
