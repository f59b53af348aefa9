"""Whether a plan is of this model: the first difference is named before anything runs."""

from __future__ import annotations

from itertools import zip_longest

import torch

from scrimp._warnings import warn
from scrimp.capture import Graph, fingerprint
from scrimp.errors import PlanWarning, RunError
from scrimp.planner import Plan, PlannedLayers

_REMEDY = "plan this model and batch with scrimp.plan"


def verify(plan: Plan, graph: Graph) -> None:
    """Raises `RunError` if the plan was made for another model, batch or precision, with the first difference."""
    if plan.precision.startswith("megatron"):
        raise RunError(
            f"precision={plan.precision!r}: this plan is for comparison with Megatron-LM and cannot be run; plan with "
            "precision='bf16' or 'fp32'"
        )
    _batch(plan, graph)
    layers = sum(each.count for each in plan.layers)
    if layers != len(graph.layers):
        raise RunError(f"the plan has {layers} layers, the model {len(graph.layers)}; {_REMEDY}")
    for planned in plan.layers:
        path = graph.layers[planned.first].path
        if planned.path != path:
            raise RunError(f"layer {planned.first} is {planned.path!r} in the plan and {path!r} in the model; {_REMEDY}")
        _operators(planned, graph)


def verify_fingerprint(plan: Plan, graph: Graph) -> None:
    """The last check, of everything else. Warns if another version of torch captured the same graph."""
    here = torch.__version__.partition("+")[0]
    if fingerprint(graph) != plan.model.graph:
        why = f": torch {plan.model.torch} captured the planned one, this is torch {here}" if plan.model.torch != here else ""
        raise RunError(f"the plan's fingerprint is {plan.model.graph}, the model's {fingerprint(graph)}{why}; {_REMEDY}")
    if plan.model.torch != here:
        warn(f"the plan was made with torch {plan.model.torch}, this is torch {here}; both capture the same graph", PlanWarning)


def _operators(planned: PlannedLayers, graph: Graph) -> None:
    layer = graph.layers[planned.first]
    for k, (one, other) in enumerate(zip_longest(planned.ops, graph.graphs[layer.graph].ops)):
        names = [each.target if each is not None else "missing" for each in (one, other)]
        if names[0] != names[1]:
            where = f" ({other.where})" if other is not None else ""
            raise RunError(
                f"layer {layer.path or 'the model'}: operator {k} is {names[0]} in the plan and {names[1]}{where} in the model; "
                f"{_REMEDY}"
            )


def _batch(plan: Plan, graph: Graph) -> None:
    planned, given = {each.name: each for each in plan.batch}, {each.name: each for each in graph.batch}
    if planned.keys() != given.keys():
        raise RunError(f"the plan's batch has {', '.join(planned)}, this one {', '.join(given)}; {_REMEDY}")
    for name, one in planned.items():
        other = given[name]
        if (one.shape, one.dtype) != (other.shape, other.dtype):
            raise RunError(
                f"'{name}' of the batch is {one.dtype}{list(one.shape)} in the plan and {other.dtype}{list(other.shape)} here; "
                f"{_REMEDY}"
            )
