"""The only module that uses AOTAutograd's private API: traces forward and backward of a module as one graph of ATen calls.

`tests/capture/torch_private/test_private.py` fails when that API changes.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor, fx
from torch._functorch._aot_autograd.descriptors import (
    GradAOTOutput,
    InputMutationAOTOutput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
)
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

__all__ = ["DATA_DEPENDENT", "FakeTensorMode", "Joint", "describe", "is_backward", "is_view", "sequence_number", "trace_joint"]

DATA_DEPENDENT = (DataDependentOutputException, DynamicOutputShapeException)  # fake tensors have no data, and raise these


@dataclass(frozen=True, kw_only=True)
class Joint:
    """`inputs`: the placeholder of each input, by position; `tangents`: of an output by position, its incoming gradient.
    `gradients`, `updates`: of an input by position. An output, a gradient or an update may be any node, or a placeholder."""

    module: fx.GraphModule
    inputs: dict[int, fx.Node]
    outputs: dict[int, fx.Node]
    tangents: dict[int, fx.Node]
    gradients: dict[int, fx.Node]
    updates: dict[int, fx.Node]


def trace_joint(module: fx.GraphModule, inputs: Sequence[Tensor]) -> fx.GraphModule:
    """Traces without decomposing operators. Inputs are fake tensors, the module has neither parameters nor buffers."""
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        made: fx.GraphModule = aot_export_joint_with_descriptors(stack, module, tuple(inputs), decompositions={}).graph_module
    return made


def describe(made: fx.GraphModule) -> Joint:
    """The roles of the placeholders and outputs of a joint graph."""
    result = Joint(module=made, inputs={}, outputs={}, tangents={}, gradients={}, updates={})
    for node in made.graph.find_nodes(op="placeholder"):
        match node.meta["desc"]:
            case PlainAOTInput(idx=position):
                result.inputs[position] = node
            case TangentAOTInput(output=PlainAOTOutput(idx=position)):
                result.tangents[position] = node
            case other:
                raise NotImplementedError(f"an input of kind {other}")
    (output,) = made.graph.find_nodes(op="output")
    for node, what in zip(output.args[0], output.meta["desc"], strict=True):
        match what:
            case PlainAOTOutput(idx=position):
                result.outputs[position] = node
            case GradAOTOutput(grad_of=PlainAOTInput(idx=position)):
                if node is not None:
                    result.gradients[position] = node
            case InputMutationAOTOutput(mutated_input=PlainAOTInput(idx=position)):
                result.updates[position] = node
            case None:
                pass
            case other:
                raise NotImplementedError(f"an output of kind {other}")
    return result


def is_backward(node: fx.Node) -> bool:
    return node.meta.get("partitioner_tag") == "is_backward"


def sequence_number(node: fx.Node) -> int | None:
    """Autograd's number of the forward operator that a node belongs to. Where autograd adds gradients, and where an operator
    records nothing, it is a stale number of another operator."""
    number = node.meta.get("seq_nr")
    return None if number is None else int(number)


def is_view(target: object) -> bool:
    """Whether the schema says that the result is a view of the first argument. `_unsafe_view` does not say so: it promises only
    that nobody will notice."""
    if target is torch.ops.aten._unsafe_view.default:
        return True
    arguments = target._schema.arguments if isinstance(target, torch._ops.OpOverload) else []
    shared = [argument.alias_info for argument in arguments if argument.alias_info is not None]
    return bool(shared) and not any(alias.is_write for alias in shared)
