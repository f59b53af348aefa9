"""What `scrimp.plan` is asked, looked at before anything takes long: types, names and numbers that make no sense.

Torch is loaded only where a model is looked at, so that the command line can check names without it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from scrimp.capture._graph import Graph
from scrimp.cluster import Cluster
from scrimp.errors import PlanError
from scrimp.layout import Mesh
from scrimp.planner._solve import MEMORY, REDUNDANCY, TIME
from scrimp.planner._states import OPTIMIZERS, PRECISIONS
from scrimp.planner._ways import KEEP, WAYS


def check_question(
    *, model: Any, example_inputs: Any, cluster: Any, mesh: Any, objective: Any, optimizer: Any, precision: Any, saving: Any,
    seconds: Any, gap: Any,
) -> None:  # fmt: skip
    """Says what is wrong."""
    from torch import nn

    if not isinstance(model, nn.Module):
        made = f"the class {model.__name__}: make one of it" if isinstance(model, type) else f"{type(model).__name__}"
        raise PlanError(f"model must be a torch.nn.Module, and is {made}")
    _check_inputs(example_inputs)
    if not isinstance(cluster, (Cluster, str)):
        raise PlanError(f"cluster must be a Cluster or the name of a preset, such as '8xH100', and is {type(cluster).__name__}")
    if not (mesh is None or isinstance(mesh, (Mesh, str))) or (isinstance(mesh, str) and not mesh.strip()):
        raise PlanError(f"mesh={mesh!r}: give a Mesh, or a text such as 'x=2,y=4'; without one it is searched for")
    check_names(precision=precision, optimizer=optimizer, objective=objective, seconds=seconds, gap=gap)
    if isinstance(saving, str) or not isinstance(saving, Sequence) or KEEP not in saving or not {*saving} <= {*WAYS}:
        raise PlanError(f"saving={saving!r}: give some of {', '.join(WAYS)}, of which '{KEEP}' must be one")


def check_names(*, precision: Any, optimizer: Any, objective: Any, seconds: Any, gap: Any) -> None:
    """What can be said without torch."""
    _check_name("precision", precision, PRECISIONS)
    _check_name("optimizer", optimizer, (*OPTIMIZERS,))
    _check_name("objective", objective, (MEMORY, TIME, REDUNDANCY))
    if not (_is_number(seconds) and seconds >= 0 and _is_number(gap) and 0 <= gap < 1):
        raise PlanError(f"seconds={seconds!r}, gap={gap!r}: seconds is 0 or more, gap from 0 to less than 1")


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
            f"example_inputs must be a tuple of what the forward takes, or a dict by name, and is {type(inputs).__name__}"
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
    """What is to be said where the rows of a batch cannot be shared out over any axis of a mesh: its devices then can only share
    work by the other dims."""
    rows = {value.shape[0] for value in graph.batch if value.shape}
    axes = [size for _, size in mesh.axes if size > 1]
    if len(rows) != 1 or not axes:
        return None
    (count,) = rows
    if any(count % size == 0 for size in axes):
        return None
    size = min(axes)
    return (
        f"no axis of the mesh {mesh} divides the batch's {count} rows, so every device has all of them: give a multiple of "
        f"{size}, such as {max(1, round(count / size)) * size}"
    )
