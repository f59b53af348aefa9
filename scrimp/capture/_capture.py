"""`capture`: an `nn.Module` and an example batch -> `Graph`, on the CPU, without a byte of the model's parameters.

    fakes     replace the model's tensors and the batch's              trace/fakes.py
    trace     the forward as one graph of torch calls                   torch_private/dynamo.py
    clean     without calls that compute nothing                        trace/clean.py
    split     into layers; alike ones share what follows                split/split.py
    piece     a layer's calls as a module                               joint/segment_module.py
    joint     its forward and backward as ATen calls                    torch_private/joint.py
    graph     as data                                                   joint/layer_graph.py

All but `trace` works on one layer of each class, and `trace` sees few of a run of identical layers (trace/depth.py).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn

from scrimp._warnings import warn
from scrimp.capture.graph.graph import BORDER, BUFFER, PARAMETER, Graph, Layer, LayerGraph, Parameter, Source, Value
from scrimp.capture.joint.layer_graph import Input, layer_graph
from scrimp.capture.joint.segment_module import Piece, piece
from scrimp.capture.split.segment import Stretch, key, stretch
from scrimp.capture.split.split import Splitter
from scrimp.capture.torch_private.dynamo import Refused, line_of, storage_of, trace
from scrimp.capture.torch_private.joint import FakeTensorMode, trace_joint
from scrimp.capture.trace.batch_names import batch_names
from scrimp.capture.trace.clean import WAY_OUT, clean, tensor_of
from scrimp.capture.trace.decided import decided
from scrimp.capture.trace.depth import Run, lengthened, runs_of, shortened
from scrimp.capture.trace.diagnose import failure
from scrimp.capture.trace.fakes import dtype_name, fake, faked, parameters_of
from scrimp.capture.trace.hf_patches import as_in_training
from scrimp.capture.trace.source_location import Places, named
from scrimp.errors import CaptureError


class _Loss(nn.Module):
    """Wraps the model to return the loss alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = self.model(*args, **kwargs)
        if isinstance(result, Tensor):
            return result
        loss = result.get("loss") if isinstance(result, Mapping) else getattr(result, "loss", None)
        return torch.empty(0) if loss is None else loss  # Dynamo cannot return None


def capture(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> Graph:
    """Captures one training step as a graph of layers. The forward returns a scalar loss, or an object or a dict with `loss`.
    Model and batch may be on any device, also on meta; shapes are fixed to those of the batch."""
    runs = runs_of(model)
    if runs:
        with suppress(CaptureError):  # the error of the whole model is more informative
            graph: Graph | None = _Capture(model, args, kwargs or {}, runs).run()
            for run in runs:
                graph = graph and lengthened(graph, run)
            if graph is not None:
                return graph
    return _Capture(model, args, kwargs or {}).run()


class _Capture:
    """`runs`: of identical layers, most of which are left out."""

    def __init__(self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], runs: Sequence[Run] = ()) -> None:
        self.model, self.runs = model, runs
        self.mode = FakeTensorMode()
        self.places = Places(model)
        self.names = batch_names(model, args, kwargs)
        self.given = dict(zip(self.names, _tensors((tuple(args), dict(kwargs))), strict=True))
        # One fake per tensor: one that is given twice, as tokens and as labels, counts as two tensors of the batch.
        fakes = pytree.tree_map_only(Tensor, lambda tensor: fake(self.mode, tensor, False), (tuple(args), dict(kwargs)))
        self.args, self.kwargs = fakes
        self.parameters = tuple(parameters_of(model).values())

    def run(self) -> Graph:
        with (
            torch.enable_grad(),
            faked(self.model, self.mode) as known,
            as_in_training(self.model, self.given),
            decided(),
            shortened(self.model, self.runs),
        ):
            module, tensors, effects = self._trace()
            holders = [node for node in module.graph.nodes if node.op == "placeholder"]
            owned = {node: known[id(tensor)] for node, tensor in zip(holders, tensors, strict=True) if id(tensor) in known}
            batch = self._batch(holders, tensors, owned)
            clean(module.graph, self.places.of, _way_out(self.model))
            loss = self._loss(module.graph)
            nodes = [node for node in module.graph.nodes if node.op not in ("placeholder", "output")]
            parts = Splitter(nodes, self.places.paths(nodes), owned).split()
            stretches = [stretch(nodes[part.first : part.last]) for part in parts]
            graph = self._graph([part.path for part in parts], stretches, module, owned, batch, loss)
        self._warn(effects, graph)
        return graph

    def _warn(self, effects: Sequence[str], graph: Graph) -> None:
        """Warns of attributes that the forward sets, except buffers written in place, which the graph updates, and notes in the
        config, as Hugging Face makes them."""
        updated = {dict(each.parameters)[name] for each in graph.layers for name, _ in graph.graphs[each.graph].updates}
        lost = []
        for path in (name.removeprefix("model").lstrip(".") for name in effects):
            owner = path.removesuffix("_buffers")
            if not path.endswith("config") and not (owner != path and any(name.startswith(owner) for name in updated)):
                lost.append(owner.rstrip(".") or "the model")
        if lost:
            text = f"{type(self.model).__name__}: the forward sets attributes of {', '.join(lost)}, which a planned step does not"
            warn(text)

    def _trace(self) -> tuple[fx.GraphModule, list[Tensor], list[str]]:
        try:
            module, tensors, effects = trace(_Loss(self.model), (self.args, self.kwargs))
        except Refused as error:
            failed = failure(self.model, self.args, self.kwargs, self.mode)
            if failed is not None:
                given = ", ".join(f"{name} {tuple(each.shape)} {dtype_name(each.dtype)}" for name, each in self.given.items())
                raise CaptureError(f"{failed}; the batch is {given or 'empty'}") from error
            where = self.places.at(error.frames)
            way_out = _way_out(self.model) if "experts" in where else WAY_OUT
            raise CaptureError(
                f"{where}: the forward depends on the values of tensors, or has calls that "
                f"cannot be traced ({error.reason}); {self._in_eval()}{way_out}"
            ) from error
        return module, tensors, effects

    def _in_eval(self) -> str:
        """Whether the model can be traced in eval mode; it is tried on the whole model alone."""
        training = [module for module in self.model.modules() if module.training]
        if self.runs or not training:
            return ""
        try:
            self.model.eval()
            trace(_Loss(self.model), (self.args, self.kwargs))
        except Exception:  # if this fails too, it is no workaround
            return ""
        finally:
            for module in training:
                module.training = True
        return (
            "only training mode fails: after model.eval() the model can be planned, without dropout; or set the rate of "
            "what is dropped to 0 (Hugging Face: layerdrop in the config); or "
        )

    def _batch(self, holders: list[fx.Node], tensors: list[Tensor], owned: Mapping[fx.Node, Parameter]) -> dict[fx.Node, str]:
        names = {id(leaf): name for name, leaf in zip(self.names, _tensors((self.args, self.kwargs)), strict=True)}
        found = {}
        for node, tensor in zip(holders, tensors, strict=True):
            if node not in owned and id(tensor) not in names:
                raise CaptureError(
                    f"{type(self.model).__name__} uses a tensor of shape {tuple(tensor.shape)} that is neither a parameter, nor "
                    "a buffer, nor in the batch; register it as a buffer"
                )
            if node not in owned:
                found[node] = names[id(tensor)]
        return found

    def _loss(self, graph: fx.Graph) -> fx.Node:
        (output,) = graph.find_nodes(op="output")
        nodes = [node for node in pytree.tree_leaves(output.args) if isinstance(node, fx.Node)]
        loss = tensor_of(nodes[0]) if len(nodes) == 1 else None
        if loss is None or loss.numel() != 1 or not loss.requires_grad or nodes[0].op == "placeholder":
            got = "no loss" if loss is None or loss.numel() == 0 else f"a tensor of shape {tuple(loss.shape)}"
            if loss is not None and loss.numel() == 1:
                got = "one that depends on none: are all of them frozen, or the loss detached?"
                raise CaptureError(
                    f"{type(self.model).__name__} must return a loss that depends on its parameters, but gave {got}"
                )
            raise CaptureError(
                f"{type(self.model).__name__} must return a scalar loss that depends on its parameters, or an object or a dict "
                f"with 'loss', but gave {got}: are the labels in the batch?"
            )
        return nodes[0]

    def _graph(
        self,
        paths: Sequence[str],
        stretches: Sequence[Stretch],
        module: fx.GraphModule,
        owned: Mapping[fx.Node, Parameter],
        batch: Mapping[fx.Node, str],
        loss: fx.Node,
    ) -> Graph:
        classes: dict[Hashable, int] = {}
        graphs: list[LayerGraph] = []
        layers: list[Layer] = []
        made: dict[fx.Node, Source] = {node: Source(layer=None, name=name) for node, name in batch.items()}
        written: list[frozenset[int]] = []
        for path, part in zip(paths, stretches, strict=True):
            found = classes.setdefault(key(part, owned), len(graphs))
            if found == len(graphs):
                cut = piece(part, module, owned, self.mode)
                self._check_writes(part, cut.written, owned, stretches)
                inputs = [_input(node, path, owned, batch) for node in part.inputs]
                graphs.append(layer_graph(self._joint(cut, path, part), inputs, self.places.of))
                written.append(cut.written)
            else:
                self._check_writes(part, written[found], owned, stretches)
            graph = graphs[found]
            pairs = zip(graph.inputs, part.inputs, strict=True)
            layers.append(
                Layer(
                    path=path,
                    graph=found,
                    parameters=tuple((name, owned[node].name) for name, node in pairs if node in owned),
                    inputs=tuple(made[node] for node in part.inputs if node not in owned),
                )
            )
            for name, node in zip(graph.outputs, part.outputs, strict=True):
                made[node] = Source(layer=len(layers) - 1, name=name)
        return Graph(
            graphs=tuple(graphs),
            layers=tuple(layers),
            parameters=self.parameters,
            batch=tuple(_value(name, tensor) for name, tensor in self.given.items()),
            loss=made[loss],
        )

    def _joint(self, cut: Piece, path: str, part: Stretch) -> fx.GraphModule:
        try:
            return trace_joint(cut.module, cut.inputs)
        except Exception as error:  # operators raise many kinds of errors
            line = line_of(part.nodes[0].meta.get("stack_trace"))
            raise CaptureError(
                f"{named(path)}, {line} and behind: the layer's backward cannot be traced "
                f"without data ({type(error).__name__}: {str(error).partition(chr(10))[0]}); {_way_out(self.model)}"
            ) from error

    def _check_writes(
        self, part: Stretch, written: frozenset[int], owned: Mapping[fx.Node, Parameter], stretches: Sequence[Stretch]
    ) -> None:
        """Writing in place into another layer's tensor is allowed if no later call reads its old bytes, also through a view."""
        if not written:
            return
        index = next(k for k, each in enumerate(stretches) if each is part)
        new = {node for each in stretches[index:] for node in each.nodes}
        later = {node for each in stretches[index + 1 :] for node in each.inputs if node not in new}
        for position in written:
            node = part.inputs[position]
            if node in owned or any(_share(node, each) for each in later):
                what = f"the parameter {owned[node].name}" if node in owned else f"'{node.name}', which other layers read later,"
                writer = next(each for each in part.nodes if node in each.all_input_nodes)
                raise CaptureError(f"{self.places.of(writer)}: {what} is written into in place; write into a copy, or {WAY_OUT}")


def _tensors(tree: object) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _share(one: fx.Node, two: fx.Node) -> bool:
    left, right = tensor_of(one), tensor_of(two)
    return left is not None and right is not None and storage_of(left) == storage_of(right)


def _way_out(model: nn.Module) -> str:
    """Advice for mixtures of experts: a loop over experts depends on the data, and so do grouped matmuls unless they are in
    bf16."""
    config = getattr(model, "config", None)
    experts = any(getattr(config, name, None) for name in ("num_local_experts", "num_experts", "n_routed_experts"))
    if experts and getattr(config, "_experts_implementation", None) != "batched_mm":
        return (
            "for Mixtral and its like set experts_implementation='batched_mm' in the config ('grouped_mm' is for bf16); or "
            f"{WAY_OUT}"
        )
    return WAY_OUT


def _input(node: fx.Node, path: str, owned: Mapping[fx.Node, Parameter], batch: Mapping[fx.Node, str]) -> Input:
    if node not in owned:
        return Input(name=batch.get(node, node.name), kind=BORDER)
    name = owned[node].name
    return Input(name=name.removeprefix(f"{path}."), kind=BUFFER if owned[node].buffer else PARAMETER)


def _value(name: str, tensor: Tensor) -> Value:
    return Value(name=name, shape=tuple(tensor.shape), dtype=dtype_name(tensor.dtype), storage=name, kind=BORDER)
