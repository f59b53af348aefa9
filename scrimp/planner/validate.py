"""Checks the arguments of `scrimp.plan` before any long work: wrong types, unknown names, numbers out of range.

It imports torch only to check a model, so that the command line can check names without torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any, Protocol

from scrimp.capture import Graph
from scrimp.cluster import Cluster
from scrimp.errors import PlanError
from scrimp.layout import Mesh
from scrimp.planner.cost.zero_levels import OPTIMIZERS, PRECISIONS
from scrimp.planner.solver.solve import MEMORY, REDUNDANCY, TIME


class PlannedOptimizer(Protocol):
    """The attributes of `AdamW` and `SGD` that the planner reads: how many fp32 states each parameter has."""

    @property
    def states(self) -> int: ...

    @property
    def state(self) -> str: ...


def optimizer_name(optimizer: Any) -> Any:
    """The planner's name for an optimizer object; returns anything else unchanged."""
    states, state = getattr(optimizer, "states", None), getattr(optimizer, "state", None)
    if isinstance(optimizer, (str, type)) or states is None or state is None:
        return optimizer
    if state != "fp32":
        raise PlanError(f"{type(optimizer).__name__}(state={state!r}): the planner has fp32 states only; plan with state='fp32'")
    if type(optimizer).__name__ == "SGD" and states == 0:
        raise PlanError("SGD without momentum: the planner counts one momentum per parameter; give SGD(momentum=0.9), or 'sgd'")
    return {"AdamW": "adamw", "SGD": "sgd"}.get(type(optimizer).__name__, optimizer)


def check_request(
    *, model: Any, example_inputs: Any, cluster: Any, mesh: Any, objective: Any, optimizer: Any, precision: Any,
    time_limit: Any, gap: Any,
) -> None:  # fmt: skip
    """Raises `PlanError` for the first wrong argument."""
    from torch import nn

    if not isinstance(model, nn.Module):
        made = f"the class {model.__name__}: give an instance" if isinstance(model, type) else f"{type(model).__name__}"
        raise PlanError(f"model must be a torch.nn.Module, not {made}")
    _check_inputs(example_inputs)
    if not isinstance(cluster, (Cluster, str)):
        raise PlanError(f"cluster must be a Cluster or the name of a preset, such as '8xH100', not {type(cluster).__name__}")
    if not (mesh is None or isinstance(mesh, (Mesh, str))) or (isinstance(mesh, str) and not mesh.strip()):
        raise PlanError(f"mesh={mesh!r}: give a Mesh, or a text such as 'x=2,y=4'; leave it out to have it searched")
    check_names(precision=precision, optimizer=optimizer_name(optimizer), objective=objective, time_limit=time_limit, gap=gap)


def check_names(*, precision: Any, optimizer: Any, objective: Any, time_limit: Any, gap: Any) -> None:
    """The checks that need no torch."""
    _check_name("precision", precision, PRECISIONS)
    _check_name("optimizer", optimizer, (*OPTIMIZERS,))
    _check_name("objective", objective, (MEMORY, TIME, REDUNDANCY))
    if not (_is_number(time_limit) and time_limit >= 0 and _is_number(gap) and 0 <= gap < 1):
        raise PlanError(f"time_limit={time_limit!r}, gap={gap!r}: time_limit is 0 seconds or more, gap from 0 to less than 1")


def _check_inputs(inputs: Any) -> None:
    import torch.utils._pytree as pytree
    from torch import Tensor

    if isinstance(inputs, Tensor):
        raise PlanError(
            f"example_inputs is a tensor of shape {tuple(inputs.shape)}: give what the forward takes as a tuple, (tensor,), or "
            "by name, {'x': tensor}"
        )
    if isinstance(inputs, str) or not isinstance(inputs, (Sequence, Mapping)):
        raise PlanError(
            f"example_inputs must be a tuple of what the forward takes, or a dict by name, not {type(inputs).__name__}"
        )
    for tensor in pytree.tree_leaves(dict(inputs) if isinstance(inputs, Mapping) else tuple(inputs)):
        if isinstance(tensor, Tensor) and tensor.numel() == 0:
            raise PlanError(f"example_inputs has a tensor of shape {tuple(tensor.shape)}, which is empty: give a batch with rows")


def _check_name(what: str, given: Any, names: Sequence[str]) -> None:
    if isinstance(given, str) and given in names:
        return
    near = get_close_matches(given, names, 1) if isinstance(given, str) else []
    hint = f"; did you mean '{near[0]}'?" if near else ""
    raise PlanError(f"{what}={given!r}: there are {', '.join(names)}{hint}")


def _is_number(given: Any) -> bool:
    return isinstance(given, (int, float)) and not isinstance(given, bool)


def batch_that_no_axis_divides(graph: Graph, mesh: Mesh) -> str | None:
    """A warning text if no mesh axis divides the batch, else None: such a mesh can split work only along other dims."""
    rows = {value.shape[0] for value in graph.batch if value.shape}
    axes = [size for _, size in mesh.axes if size > 1]
    if len(rows) != 1 or not axes:
        return None
    (count,) = rows
    if any(count % size == 0 for size in axes):
        return None
    size = min(axes)
    return (
        f"no axis of the mesh {mesh} divides the batch's {count} rows, so every device holds all of them: give a multiple of "
        f"{size}, such as {max(1, round(count / size)) * size}"
    )
