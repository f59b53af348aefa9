"""The planner: every operator's sharding by an integer program that minimises peak memory, then time.

In:   a model (or a captured `Graph`), a batch, a `Cluster`, a memory limit.
Out:  a `Plan`: the layout of every tensor, predicted bytes and seconds, and a proven optimality gap.

    capture ──> shard ──> cost ──> formulate ──> solve ──> report
    (Graph)    options    moves     Problem      choice    Plan

    minimise  peak = max over points t of  sum of bytes held at t        first
              time = sum of operator seconds + move seconds              then, with the peak bounded

Read in this order:

    api.py      `plan`: the whole of it in one screen
    validate.py, micro_batches.py, deadline.py, host_tier.py    arguments, micro-batches, the time limit, advice
    budget.py   what a plan may use of a device: the budget, without what the device needs beside the plan
    shard/      dims as products of atoms; operators that split alike become one group; what a group may choose
    cost/       seconds and bytes of a move, of states at rest (ZeRO levels), of saved activations
    formulation/  the problem: nodes, edges and holds, from the layers of a model
    solver/     the integer program without torch: presolve, linear program, local search, branch and bound, Pareto front
    large/      the same for tens of thousands of distinct nodes: propagation, contraction, descent over trees
    mesh/       the search on one mesh with many axes, and its lower bound
    pipeline/   stages, micro-batch schedules, and where to cut the model
    answers/    `Plan`, explain, diff, what_if, alternatives for a report, operators that stay unsharded
    baselines/  Megatron-LM, data parallelism and ZeRO as plans of the same memory model
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from scrimp._lazy import lazily

if TYPE_CHECKING:
    from scrimp._arguments import KEEP, OFFLOAD, RECOMPUTE
    from scrimp.planner.answers.from_solution import memory_of
    from scrimp.planner.answers.plan import Plan, PlannedGroup, PlannedLayers
    from scrimp.planner.answers.what_if import change_of
    from scrimp.planner.api import captured, captured_for, plan
    from scrimp.planner.baselines.compare import BASELINES, DATA, TENSOR, Comparison, Drawn, baseline_plan, compare
    from scrimp.planner.budget import check_reserve, limit_of
    from scrimp.planner.cost.operator_classes import class_of
    from scrimp.planner.cost.operator_work import OperatorWork, work_of
    from scrimp.planner.cost.zero_levels import GRADIENTS, STATES, UPDATE_NBYTES, WEIGHTS, axes_at_rest, precision_of
    from scrimp.planner.formulation.assembly import Assembly
    from scrimp.planner.formulation.on_mesh import Layers, OnMesh
    from scrimp.planner.pipeline.plan import schedules
    from scrimp.planner.pipeline.schedule import Task, tasks
    from scrimp.planner.pipeline.stage_devices import stage_cluster, whole_mesh
    from scrimp.planner.shard.layer_model import LayerModel
    from scrimp.planner.shard.op_groups import kept_whole
    from scrimp.planner.shard.options import passed_on
    from scrimp.planner.shard.placement import Placed, between, common, placed, unsplit
    from scrimp.planner.shard.stage_subgraph import Piece, piece
    from scrimp.planner.solver.backend import solver_name
    from scrimp.planner.solver.evaluate import Evaluation, evaluate, held_nbytes
    from scrimp.planner.solver.found import Phase
    from scrimp.planner.solver.pareto import frontier
    from scrimp.planner.solver.problem import Edge, Hold, Node, PairHold, Problem
    from scrimp.planner.solver.solve import Solution, solve
    from scrimp.planner.validate import check_names

__all__ = [
    "BASELINES", "DATA", "GRADIENTS", "KEEP", "OFFLOAD", "RECOMPUTE", "STATES", "TENSOR", "UPDATE_NBYTES", "WEIGHTS",
    "Assembly", "Comparison", "Drawn", "Edge", "Evaluation", "Hold", "LayerModel", "Layers", "Node", "OnMesh", "OperatorWork",
    "PairHold", "Phase", "Piece", "Placed", "Plan", "PlannedGroup", "PlannedLayers", "Problem", "Solution", "Task",
    "axes_at_rest", "baseline_plan", "between", "captured", "captured_for", "change_of", "check_names", "check_reserve",
    "class_of", "common", "compare", "evaluate", "frontier", "held_nbytes", "kept_whole", "limit_of", "memory_of",
    "passed_on", "piece", "placed", "plan", "precision_of", "schedules", "solve", "solver_name", "stage_cluster", "tasks",
    "unsplit", "whole_mesh", "work_of",
]  # fmt: skip

__getattr__ = lazily(
    __name__,
    {
        "KEEP": "scrimp._arguments",
        "OFFLOAD": "scrimp._arguments",
        "RECOMPUTE": "scrimp._arguments",
        "memory_of": "scrimp.planner.answers.from_solution",
        "Plan": "scrimp.planner.answers.plan",
        "PlannedGroup": "scrimp.planner.answers.plan",
        "PlannedLayers": "scrimp.planner.answers.plan",
        "change_of": "scrimp.planner.answers.what_if",
        "captured": "scrimp.planner.api",
        "captured_for": "scrimp.planner.api",
        "check_reserve": "scrimp.planner.budget",
        "limit_of": "scrimp.planner.budget",
        "plan": "scrimp.planner.api",
        "BASELINES": "scrimp.planner.baselines.compare",
        "DATA": "scrimp.planner.baselines.compare",
        "TENSOR": "scrimp.planner.baselines.compare",
        "Comparison": "scrimp.planner.baselines.compare",
        "Drawn": "scrimp.planner.baselines.compare",
        "compare": "scrimp.planner.baselines.compare",
        "baseline_plan": "scrimp.planner.baselines.compare",
        "Assembly": "scrimp.planner.formulation.assembly",
        "Layers": "scrimp.planner.formulation.on_mesh",
        "OnMesh": "scrimp.planner.formulation.on_mesh",
        "GRADIENTS": "scrimp.planner.cost.zero_levels",
        "STATES": "scrimp.planner.cost.zero_levels",
        "WEIGHTS": "scrimp.planner.cost.zero_levels",
        "UPDATE_NBYTES": "scrimp.planner.cost.zero_levels",
        "OperatorWork": "scrimp.planner.cost.operator_work",
        "class_of": "scrimp.planner.cost.operator_classes",
        "work_of": "scrimp.planner.cost.operator_work",
        "axes_at_rest": "scrimp.planner.cost.zero_levels",
        "precision_of": "scrimp.planner.cost.zero_levels",
        "schedules": "scrimp.planner.pipeline.plan",
        "Task": "scrimp.planner.pipeline.schedule",
        "tasks": "scrimp.planner.pipeline.schedule",
        "stage_cluster": "scrimp.planner.pipeline.stage_devices",
        "whole_mesh": "scrimp.planner.pipeline.stage_devices",
        "LayerModel": "scrimp.planner.shard.layer_model",
        "kept_whole": "scrimp.planner.shard.op_groups",
        "Placed": "scrimp.planner.shard.placement",
        "common": "scrimp.planner.shard.placement",
        "passed_on": "scrimp.planner.shard.options",
        "between": "scrimp.planner.shard.placement",
        "placed": "scrimp.planner.shard.placement",
        "unsplit": "scrimp.planner.shard.placement",
        "Piece": "scrimp.planner.shard.stage_subgraph",
        "piece": "scrimp.planner.shard.stage_subgraph",
        "solver_name": "scrimp.planner.solver.backend",
        "Evaluation": "scrimp.planner.solver.evaluate",
        "evaluate": "scrimp.planner.solver.evaluate",
        "held_nbytes": "scrimp.planner.solver.evaluate",
        "Phase": "scrimp.planner.solver.found",
        "frontier": "scrimp.planner.solver.pareto",
        "Edge": "scrimp.planner.solver.problem",
        "Hold": "scrimp.planner.solver.problem",
        "Node": "scrimp.planner.solver.problem",
        "PairHold": "scrimp.planner.solver.problem",
        "Problem": "scrimp.planner.solver.problem",
        "Solution": "scrimp.planner.solver.solve",
        "solve": "scrimp.planner.solver.solve",
        "check_names": "scrimp.planner.validate",
    },
)
