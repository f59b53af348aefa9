"""A lowered layer as an ordinary differentiable `nn.Module`, for a training loop of one's own.

    block = scrimp.lower.module(plan, "blocks.3", model)      # this rank's tiles of the layer's weights
    y = block(x)                                              # this rank's parts
    y.sum().backward()                                        # gradients in `block.parameters()`

Tensors that enter and leave are complete: partial sums are reduced at the border, and a gradient has the placement of its tensor.
Between forward and backward the module holds what the plan saves, and frees each tensor at its last use. Weights are held as they
are in use, whatever shards them at rest in the plan: an optimizer for them is the loop's business.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor, nn

from scrimp.capture import PARAMETER, Graph
from scrimp.errors import RunError
from scrimp.lower.layer import ahead, behind
from scrimp.lower.model import Lowered, LoweredLayer, lower, placed_weights
from scrimp.lower.moves import Communicator, Ranks, local_shape, redistribute
from scrimp.lower.run import Slots
from scrimp.lower.source import Generated
from scrimp.lower.steps import Ahead
from scrimp.lower.weights.rest import Rest
from scrimp.lower.weights.shards import Shards
from scrimp.move import mesh_rank
from scrimp.planner import Placed, Plan

Borders = tuple[tuple[str, Placed], ...]


def module(
    plan: Plan,
    layer: str | int,
    model: nn.Module | Mapping[str, Tensor],
    *,
    graph: Graph | None = None,
    comm: Communicator | None = None,
    seed: int = 0,
) -> LayerModule:
    """A layer of the plan by its module path, or by its index among the captured layers. `model`: its whole weights and buffers,
    or those by name. `graph`: the captured model, if another process made the plan. `comm`: by default torch.distributed.
    `seed`: of random numbers, the same on all ranks."""
    if graph is None:
        if plan.source is None:
            raise RunError("this plan was loaded, and has no graph: give graph=capture(model, batch)")
        graph = plan.source.graph
    lowered = lower(plan, graph)
    index = _index(layer, [each.path for each in lowered.layers])
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())} if isinstance(model, nn.Module) else model
    if comm is None:
        comm = Ranks(plan.mesh, mesh_rank(plan.mesh))
    return LayerModule(lowered, index, tensors, comm, seed=seed)


class LayerModule(nn.Module):
    """`input_places`, `output_places`: placements of what the forward takes and returns, in order. Parameters and buffers have
    the names that they have in the layer itself; a weight from elsewhere in the model has its whole name. torch.compile leaves
    the layer as it is: in a larger compiled function it is a graph break."""

    def __init__(self, lowered: Lowered, index: int, whole: Mapping[str, Tensor], comm: Communicator, *, seed: int = 0) -> None:
        super().__init__()
        self._index, self._seed, self._calls = index, seed, 0
        self._layer = _complete(lowered, index)
        self.input_places = _places(self._layer.ahead.inputs, self._layer.ahead)
        self.output_places = _places(self._layer.ahead.outputs, self._layer.ahead)
        held = {of: lowered.rest.get(of) for of in self._layer.names.values()}
        rest = {name: replace(each, weight=(), gradient=(), states=()) for name, each in held.items() if each is not None}
        self._tiles = _Tiles(rest, comm, _typed(whole, self._layer), self, self._layer.path)
        self._trained = tuple(
            self._layer.names[name]
            for name, _ in self._layer.chosen.model.graph.gradients
            if self._layer.chosen.values[name].kind == PARAMETER
        )
        self._run = Generated(lowered, comm, self._tiles)
        values = self._layer.chosen.values
        self._takes = [(local_shape(place, comm.mesh), getattr(torch, values[name].dtype)) for name, place in self.input_places]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, *inputs: Tensor) -> Any:
        self._check(inputs)
        self._calls += 1
        made = _Through.apply(self, *inputs, *(self._tiles.gather(name) for name in self._trained))  # type: ignore[no-untyped-call]
        return made[0] if len(made) == 1 else made

    def extra_repr(self) -> str:
        shown = [", ".join(f"{name}{place}" for name, place in each) for each in (self.input_places, self.output_places)]
        return f"{self._layer.path!r}, {shown[0]} -> {shown[1]}, rank {self._run.comm.rank} of {self._run.comm.mesh}"

    def _check(self, inputs: Sequence[Tensor]) -> None:
        if [(tensor.shape, tensor.dtype) for tensor in inputs] == self._takes:
            return
        where = f"layer {self._layer.path or 'the model'}"
        if len(inputs) != len(self.input_places):
            names = ", ".join(name for name, _ in self.input_places)
            raise RunError(f"{where}: {len(inputs)} inputs, it takes {len(self.input_places)}: {names}")
        for tensor, (shape, dtype), (name, place) in zip(inputs, self._takes, self.input_places, strict=True):
            if (tensor.shape, tensor.dtype) != (shape, dtype):
                given, wanted = (str(each).removeprefix("torch.") for each in (tensor.dtype, dtype))
                raise RunError(
                    f"{where}: '{name}' is {given}{list(tensor.shape)}, but rank {self._run.comm.rank} has "
                    f"{wanted}{list(shape)} of {list(place.shape)} ({place} on {self._run.comm.mesh})"
                )

    def _forward(self, inputs: Sequence[Tensor], seed: int) -> tuple[tuple[Tensor, ...], Slots]:
        front, slots = self._layer.ahead, {}
        self._set(inputs[0].device, seed)
        for (_, slot), tensor in zip(front.inputs, inputs, strict=True):
            slots[slot] = tensor.detach()
        self._run.phase(self._layer, front, slots)
        saved = {slot: slots[slot] for slot in front.saved}
        made = tuple(self._moved(slots[slot].detach(), front.slots[slot].place, None) for _, slot in front.outputs)
        return made, saved

    def _backward(self, slots: Slots, arrived: Mapping[str, Tensor], seed: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The gradients of inputs and those of weights, by name."""
        back, places = self._layer.behind, dict(self.input_places)
        self._set(next(iter(arrived.values())).device, seed)
        slots.update({slot: arrived[output] for output, slot in back.tangents})
        self._run.phase(self._layer, back, slots)
        left = {name: self._moved(slots.pop(slot), back.slots[slot].place, places[name]) for name, slot in back.gradients}
        return left, self._tiles.take()

    def _moved(self, tensor: Tensor, before: Placed, after: Placed | None) -> Tensor:
        after = before.complete() if after is None else after
        return tensor if before == after else redistribute(self._run.comm, tensor, before, after, donate=False)

    def _set(self, device: torch.device, seed: int) -> None:
        """Random numbers and device of the phase that runs next."""
        if device != self._run.device:
            self._run = Generated(self._run.lowered, self._run.comm, self._tiles, device=device)
            self._tiles.device = device
        self._run.seed, self._run.layer = seed, self._index


class _Through(torch.autograd.Function):
    """The context holds the saved tensors, not `save_for_backward`, which would keep all of them until the end of the layer's
    backward. So the backward runs once."""

    @staticmethod
    def forward(ctx: Any, layer: LayerModule, *tensors: Tensor) -> tuple[Tensor, ...]:
        inputs = tensors[: len(layer.input_places)]
        ctx.layer, ctx.seed = layer, layer._seed + layer._calls
        made, ctx.slots = layer._forward(inputs, ctx.seed)
        reached = {name for name, _ in layer._layer.behind.tangents}
        ctx.mark_non_differentiable(
            *(each for each, (name, _) in zip(made, layer.output_places, strict=True) if name not in reached)
        )
        return made

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        layer, slots = ctx.layer, ctx.slots
        if slots is None:
            raise RunError(
                f"layer {layer._layer.path or 'the model'}: a second backward; what the forward saved is freed by the first"
            )
        ctx.slots = None
        arrived = {name: gradient for gradient, (name, _) in zip(gradients, layer.output_places, strict=True)}
        of_inputs, of_weights = layer._backward(slots, arrived, ctx.seed)
        return None, *(of_inputs.get(name) for name, _ in layer.input_places), *(of_weights.get(name) for name in layer._trained)


class _Tiles(Shards):
    """Weights and buffers that are the module's own parameters and buffers: wherever it was moved, whatever was loaded."""

    def __init__(
        self, rest: Mapping[str, Rest], comm: Communicator, whole: Mapping[str, Tensor], module: nn.Module, path: str
    ) -> None:
        super().__init__(rest, comm, whole, device=next(iter(whole.values())).device if whole else "cpu")
        self._tables: dict[str, tuple[Mapping[str, Any], str]] = {}
        for name, flat in self.weights.items():
            owner, last = _owner(module, path, name)
            tile = flat.view(local_shape(self.rest[name].use, comm.mesh))
            owner.register_parameter(last, nn.Parameter(tile, requires_grad=self.rest[name].trained))
            self._tables[name] = owner._parameters, last
        for name, tensor in self.buffers.items():
            owner, last = _owner(module, path, name)
            owner.register_buffer(last, tensor)
            self._tables[name] = owner._buffers, last
        self.weights, self.buffers = {}, {}

    def gather(self, name: str) -> Tensor:
        table, last = self._tables[name]
        found: Tensor = table[last]
        return found

    def accumulate(self, name: str, gradient: Tensor, place: Placed, *, donate: bool) -> None:
        use = self.rest[name].use
        if place != use:
            gradient = redistribute(self.comm, gradient, place, use, donate=donate)
        known = self.gradients.get(name)
        self.gradients[name] = gradient if known is None else known.add_(gradient)

    def buffer(self, name: str) -> Tensor:
        return self.gather(name)

    def store(self, name: str, new: Tensor) -> None:
        self.gather(name).copy_(new)

    def take(self) -> dict[str, Tensor]:
        """The gradients of one backward, as tiles in use."""
        found, self.gradients = self.gradients, {}
        return found


def _owner(module: nn.Module, path: str, name: str) -> tuple[nn.Module, str]:
    """The submodule that holds a tensor of the model, made if it is not there, and the tensor's name in it."""
    *parts, last = name.removeprefix(f"{path}." if path else "").split(".")
    for part in parts:
        if part not in module._modules:
            module.add_module(part, nn.Module())
        module = module.get_submodule(part)
    return module, last


def _complete(lowered: Lowered, index: int) -> LoweredLayer:
    """The layer, lowered for inputs and gradients that are no partial sums."""
    layer = lowered.layers[index]
    weights = placed_weights(layer.chosen, layer.names, lowered.rest)
    borders = {name: place.complete() for name, place in _places(layer.ahead.inputs, layer.ahead)}
    front = ahead(layer.chosen, borders, weights)
    made = dict(_places(front.outputs, front))
    arrives = {output: made[output] for output, _ in layer.chosen.model.graph.tangents}
    return replace(layer, ahead=front, behind=behind(layer.chosen, front, arrives, weights), arrives=tuple(arrives.items()))


def _places(slots: Sequence[tuple[str, int]], front: Ahead) -> Borders:
    return tuple((name, front.slots[slot].place.complete()) for name, slot in slots)


def _typed(whole: Mapping[str, Tensor], layer: LoweredLayer) -> dict[str, Tensor]:
    """The layer's weights and buffers, in the precision of the plan."""
    found: dict[str, Tensor] = {}
    for name, of in layer.names.items():
        if of not in whole:
            raise RunError(f"layer {layer.path or 'the model'}: the model has no '{of}'{_nearest(of, whole)}")
        found[of] = whole[of].detach().to(getattr(torch, layer.chosen.values[name].dtype))
    return found


def _index(layer: str | int, paths: Sequence[str]) -> int:
    if isinstance(layer, int):
        if not 0 <= layer < len(paths):
            raise RunError(f"there is no layer {layer}: the plan has {len(paths)}")
        return layer
    found = [k for k, path in enumerate(paths) if path == layer]
    if not found:
        raise RunError(f"the plan has no layer '{layer}'{_nearest(layer, paths)}")
    if len(found) > 1:
        raise RunError(f"{len(found)} layers have the path '{layer}': give one of the indices {', '.join(map(str, found))}")
    return found[0]


def _nearest(name: str, names: Iterable[str]) -> str:
    near = get_close_matches(name, [each for each in names if each])
    return f"; the nearest are {', '.join(near)}" if near else ""
