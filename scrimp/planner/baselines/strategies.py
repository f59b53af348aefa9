"""Known parallelisms as plans: the planner's problem restricted to their options, so that all use one memory model.

    tensor parallel     column, row and head splits over one axis; norms and additions of the residual stream replicated on its
                        devices, or split by the sequence (`sequence=True`)
    data parallel       the batch over other axes; `shared` is the ZeRO stage: nothing sharded, optimizer states (1), gradients
                        too (2), weights too (3)
    recompute           nothing; `selective`: attention's scores and probabilities; `full`: all of a layer but its input

The solver chooses whatever they leave open to minimise time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf, prod

from scrimp._arguments import KEEP, RECOMPUTE
from scrimp.capture import PARAMETER, Graph
from scrimp.errors import PlanError
from scrimp.layout import Mesh
from scrimp.planner.baselines.roles import COLUMN, HEADS, ROW, STREAM, TABLE, WHOLE, product_of, roles_of, scores_of, width_of
from scrimp.planner.cost.zero_levels import GRADIENTS, NOTHING, STATES, WEIGHTS, levels
from scrimp.planner.formulation.assembly import Assembly
from scrimp.planner.shard.layer_model import LayerModel
from scrimp.planner.shard.op_groups import Dims
from scrimp.planner.shard.options import Option
from scrimp.planner.solver.problem import Problem

SELECTIVE, FULL = "selective", "full"
# ZeRO stages of data parallelism; and of tensor parallelism: whether it splits the sequence, and its ZeRO stage.
SHARED = {"ddp": NOTHING, "zero-1": STATES, "zero-2": GRADIENTS, "zero-3": WEIGHTS}
SPLIT = {"tp": (False, NOTHING), "tp-sp": (True, NOTHING), "tp-sp-dist-opt": (True, STATES)}
Fits = Callable[[Option, dict[str, int | None]], bool]  # of an option, and the atom that each axis splits


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """`dp` and `tp`: axes of the mesh; any other axis stays unused."""

    dp: tuple[str, ...] = ()
    tp: str | None = None
    sequence: bool = False
    shared: int = NOTHING
    recompute: str | None = None

    def narrow(self, graph: Graph, mesh: Mesh, models: Sequence[LayerModel]) -> list[LayerModel]:
        """The layers with the baseline's options alone. `PlanError` if a group has none."""
        width = width_of(graph)
        roles = [roles_of(model, width) for model in models]
        if self.tp is not None:
            self._is_transformer(graph, models, roles)
        paths = {id(graph.graphs[layer.graph]): layer.path or "the model" for layer in reversed(graph.layers)}
        found: dict[tuple[int, int], tuple[Option, ...]] = {}
        every = [(k, g, role) for k, each in enumerate(roles) for g, role in enumerate(each)]
        for k, g, role in sorted(every, key=lambda one: one[2] != HEADS):  # too few heads explain a failure best
            found[k, g] = self._left(graph, mesh, models[k], g, role, paths.get(id(models[k].graph), ""))
        return [replace(model, options=tuple(found[k, g] for g in range(len(model.groups)))) for k, model in enumerate(models)]

    def restrict(self, assembly: Assembly, problem: Problem) -> Problem:
        """The problem with only the baseline's options, and no limit; from all options, or from those that `narrow` left."""
        mesh, graph = assembly.moves.mesh, assembly.graph
        classes = list({id(part.model): part.model for part in assembly.parts}.values())
        left = dict(zip(map(id, classes), self.narrow(graph, mesh, classes), strict=True))
        again = self._again(assembly)
        allowed: dict[int, list[bool]] = {}
        for (k, g), node in assembly.nodes.items():
            model, ways = assembly.parts[k].model, assembly.ways[k, g]
            kept = {option.split for option in left[id(model)].options[g]}
            way = RECOMPUTE if (k, g) in again else KEEP
            if way not in ways.names:
                raise PlanError(
                    f"{problem.nodes[node].name}: it must be recomputed, but the problem only allows {', '.join(ways.names)}"
                )
            allowed[node] = [option.split in kept and name == way for option in model.options[g] for name in ways.names]
        level = self._level(assembly)
        for node in assembly.rest.values():
            allowed[node] = [each == level for each in levels(mesh, assembly.precision)]
        nodes = tuple(
            replace(node, seconds=tuple(one if mark else inf for one, mark in zip(node.seconds, allowed[k], strict=True)))
            for k, node in enumerate(problem.nodes)
        )
        return replace(problem, nodes=nodes, limit_nbytes=None)

    def shared_out(self, assembly: Assembly, choice: Sequence[int]) -> tuple[int, ...]:
        """Converts a choice of a baseline with another ZeRO stage into one of this."""
        found, level = list(choice), levels(assembly.moves.mesh, assembly.precision).index(self._level(assembly))
        for node in assembly.rest.values():
            found[node] = level
        return tuple(found)

    def _level(self, assembly: Assembly) -> tuple[int, ...]:
        """The ZeRO level of each axis."""
        mesh, precision = assembly.moves.mesh, assembly.precision
        level = tuple(self.shared if axis in self.dp else NOTHING for axis in mesh.names)
        if level not in levels(mesh, precision):
            raise PlanError(
                f"ZeRO stage {self.shared} does not exist for precision '{precision.name}', whose gradients take no memory of "
                "their own; use 'megatron-bf16'"
            )
        return level

    def _is_transformer(self, graph: Graph, models: Sequence[LayerModel], roles: Sequence[Sequence[str]]) -> None:
        """Raises `PlanError` if tensor parallelism is undefined for this model."""
        what = f"tensor parallelism over '{self.tp}'"
        if not any(HEADS in each for each in roles):
            raise PlanError(f"{what} splits attention by heads, and this model has no attention")
        if self.sequence and sizes_of(graph)[1] is None:
            raise PlanError(f"{what} splits the sequence, but no tensor of the batch holds tokens")
        counts = _repeats(graph)
        many = {name for layer in graph.layers if counts[layer.graph] > 1 for _, name in layer.parameters}
        for weight in graph.parameters:
            if weight.name in many and weight.trained and len(weight.shape) > 2:
                shape = "x".join(map(str, weight.shape))
                raise PlanError(f"{weight.name}: {what} is undefined for a weight of {shape}, as experts and convolutions have")

    def _again(self, assembly: Assembly) -> set[tuple[int, int]]:
        """Parts and groups that are recomputed: in layers that repeat, where another group needs activations that they do not
        keep."""
        if self.recompute is None:
            return set()
        counts = _repeats(assembly.graph)
        width, seq = width_of(assembly.graph), sizes_of(assembly.graph)[1]
        found = set()
        for k, part in enumerate(assembly.parts):
            wanted: Iterable[int] = ()
            if counts[assembly.graph.layers[part.first].graph] > 1:
                wanted = range(len(part.model.groups)) if self.recompute == FULL else scores_of(part.model, width, seq)
            found |= {(k, g) for g in wanted if RECOMPUTE in assembly.ways[k, g].names}
        if not found:
            raise PlanError(
                "selective recompute is of the scores and probabilities of attention, and this model saves none: its attention "
                "is one fused operator"
                if self.recompute == SELECTIVE
                else "full recompute needs repeated layers, and this model has none"
            )
        return found

    def _left(self, graph: Graph, mesh: Mesh, model: LayerModel, g: int, role: str, path: str) -> tuple[Option, ...]:
        left = model.options[g]
        for words, fits in self._asks(graph, mesh, model, g, role):
            left = tuple(option for option in left if fits(option, dict(zip(mesh.names, option.split, strict=True))))
            if not left:
                raise PlanError(f"{path}, {model.groups[g].name}: {words}")
        return left

    def _asks(self, graph: Graph, mesh: Mesh, model: LayerModel, g: int, role: str) -> Iterator[tuple[str, Fits]]:
        """The conditions on an option, each with the error text if no option meets it."""
        batch, seq = sizes_of(graph)
        data, tp = _batch(model, g, batch), self.tp
        over = prod(mesh.axis_size(axis) for axis in self.dp)
        if self.dp:
            words = f"a batch of {batch} cannot be split over {over} devices"
            if batch % over:
                raise PlanError(words)
            yield words, lambda option, split: all(split[axis] == data for axis in self.dp)
        idle = [axis for axis in mesh.names if axis not in self.dp and axis != tp]
        if idle:
            yield f"the axes {', '.join(idle)} cannot stay unused", lambda option, split: all(split[a] is None for a in idle)
        if tp is None:
            return
        ways, found = mesh.axis_size(tp), product_of(model, g)
        if role in (COLUMN, ROW, TABLE, WHOLE) and found is not None:
            member, weight = model.groups[g].members[found[0]], found[1]
            shape = "x".join(map(str, model.values[weight].shape))
            if role == WHOLE:
                yield f"its weight of {shape} cannot be replicated", lambda option, split: tp not in option.needed[weight].axes
                return
            made = member.outputs[0] or ()
            atoms = frozenset(made[-1] if made else ()) if role == COLUMN else member.sums
            yield (
                f"its weight of {shape} cannot be split by its {role}s over the {ways} devices of '{tp}'",
                lambda option, split: split[tp] in atoms,
            )
        elif role == HEADS:
            heads = [atom for atom in _heads(model, g) if atom != data]
            count = model.groups[g].sizes[heads[0]] if heads else 1
            whose = " of keys and values" if len(heads) > 1 else ""
            yield (
                f"{count} heads{whose} cannot be split over the {ways} devices of '{tp}'",
                lambda option, split: split[tp] in heads[:1],
            )
        elif role == STREAM:
            atom = _seq(model, g, seq) if self.sequence else None
            words = f"a sequence of {seq} cannot be split over the {ways} devices of '{tp}'"
            yield words, lambda option, split: split[tp] == atom


def sizes_of(graph: Graph) -> tuple[int, int | None]:
    """The batch size, and the sequence length if the batch holds tokens: recognised by a dim's position and size."""
    whole = [value for value in graph.batch if value.shape]
    if not whole:
        raise PlanError("the batch has no tensor with a dim: its size is unknown")
    tokens = [value for value in whole if len(value.shape) == 2 and not value.dtype.startswith(("float", "bfloat"))]
    return whole[0].shape[0], tokens[0].shape[1] if tokens else None


def _repeats(graph: Graph) -> Counter[int]:
    """The number of layers of each class."""
    return Counter(layer.graph for layer in graph.layers)


def _heads(model: LayerModel, g: int) -> list[int]:
    """Atoms of attention's first operand except for its last two dims, major first: the batch, the heads; with grouped queries
    the heads of keys come first."""
    for member in model.groups[g].members:
        op = model.graph.ops[member.op]
        if not op.backward and ("scaled_dot_product" in op.target or "softmax" in op.target):
            return [atom for dim in member.inputs[0][:-2] for atom in dim]
    return []


def _batch(model: LayerModel, g: int, size: int) -> int | None:
    """The first atom of the first dim of a tensor that is no weight."""
    return _found(model, g, size, lambda dims: dims[0][:1] if dims else ())


def _seq(model: LayerModel, g: int, size: int | None) -> int | None:
    """The atom after the batch: in the same dim, or in the next."""
    return _found(model, g, size, lambda dims: (*dims[0][1:2], *(dims[1][:1] if len(dims) > 2 else ())) if dims else ())


def _found(model: LayerModel, g: int, size: int | None, where: Callable[[Dims], Sequence[int]]) -> int | None:
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
