"""Known parallelisms as plans: the same problem with all but their options forbidden, so that one memory model serves all.

    tensor parallel         columns of what leaves the residual stream, rows of what comes back to it, over one axis; norms and
                            additions whole on all of its devices, or split by the sequence (`sequence=True`)
    data parallel           the batch over another axis; `shared` says what that axis shares out of the weights at rest:
                            nothing, states (1), gradients too (2), weights too (3)

What they leave open (attention, activations of a linear's result) is chosen to be fastest, as it follows from the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf

from scrimp.capture._graph import PARAMETER
from scrimp.errors import PlanError
from scrimp.planner._assemble import Assembly
from scrimp.planner._groups import Dims
from scrimp.planner._layer import LayerModel
from scrimp.planner._options import Option
from scrimp.planner._problem import Problem
from scrimp.planner._states import NOTHING, levels
from scrimp.planner._ways import KEEP

ROWS = ("out", "down", "o", "o_proj", "down_proj", "c_proj")  # modules whose results come back to the residual stream
STREAM = ("native_layer_norm", "add", "native_dropout", "arange")  # what is done to the stream itself


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """`tp` and `dp`: axes, if there are any. Batch and sequence are told by where they stand in a tensor, and by their sizes."""

    batch: int
    seq: int
    dp: str | None = None
    tp: str | None = None
    sequence: bool = False
    shared: int = NOTHING

    def restrict(self, assembly: Assembly, problem: Problem) -> Problem:
        """The problem with nothing else allowed, and no limit."""
        mesh = assembly.moves.mesh
        allowed: dict[int, list[bool]] = {}
        for (k, g), node in assembly.nodes.items():
            part = assembly.parts[k]
            named = dict(assembly.graph.layers[part.first].parameters)
            splits = [dict(zip(mesh.names, option.split, strict=True)) for option in part.model.options[g]]
            fits = [
                all(self._fits(part.model, g, named, option, split))
                for option, split in zip(part.model.options[g], splits, strict=True)
            ]
            allowed[node] = [fit and way == KEEP for fit in fits for way in assembly.ways[k, g].names]
        for node in assembly.rest.values():
            allowed[node] = [
                all(value == (self.shared if axis == self.dp else NOTHING) for axis, value in zip(mesh.names, level, strict=True))
                for level in levels(mesh, assembly.precision)
            ]
        for node, marks in allowed.items():
            if not any(marks):
                raise PlanError(f"{problem.nodes[node].name}: it cannot be split as {self} says; do batch and sequence divide?")
        nodes = tuple(
            replace(node, seconds=tuple(one if mark else inf for one, mark in zip(node.seconds, allowed[k], strict=True)))
            for k, node in enumerate(problem.nodes)
        )
        return replace(problem, nodes=nodes, limit_nbytes=None)

    def _fits(
        self, model: LayerModel, g: int, named: dict[str, str], option: Option, split: dict[str, int | None]
    ) -> Iterator[bool]:
        if self.dp is not None:
            yield split[self.dp] == _batch(model, g, self.batch)
        if self.tp is None:
            return
        weights = [name for name in model.weights if any(use.group == g for use in model.uses[name])]
        large = [name for name in weights if len(model.values[name].shape) > 1]
        if large:
            row = named[large[0]].split(".")[-2:-1] and named[large[0]].split(".")[-2] in ROWS
            yield self.tp in [axis for _, axes in option.needed[large[0]].dims[1 if row else 0] for axis in axes]
        elif weights or model.groups[g].name.rpartition(":")[2] in STREAM:
            yield split[self.tp] == (_seq(model, g, self.seq) if self.sequence else None)


def _batch(model: LayerModel, g: int, size: int) -> int | None:
    """The first part of the first dim of a tensor that is no weight."""
    return _found(model, g, size, lambda dims: dims[0][:1] if dims else ())


def _seq(model: LayerModel, g: int, size: int) -> int | None:
    """What comes behind the batch: in the same dim, or in the next."""
    return _found(model, g, size, lambda dims: (*dims[0][1:2], *(dims[1][:1] if len(dims) > 2 else ())) if dims else ())


def _found(model: LayerModel, g: int, size: int, where: Callable[[Dims], Sequence[int]]) -> int | None:
    group, weights = model.groups[g], {name for name, value in model.values.items() if value.kind == PARAMETER}
    for member in group.members:
        op = model.graph.ops[member.op]
        for name, dims in (*zip(op.inputs, member.inputs, strict=True), *zip(op.outputs, member.outputs, strict=True)):
            if name is None or dims is None or model.values[name].storage in weights:
                continue
            for atom in where(dims):
                if group.sizes[atom] == size and group.may_split[atom]:
                    return atom
    return None
