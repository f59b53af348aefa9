"""Normalisation. Layer, RMS and group norms do not split the dims they normalise; rows, and groups, may be split, and gradients
of weights are then partial sums over the rows. Batch norm normalises over the batch itself: where that is split, members
communicate."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from scrimp.rules.core.builder import Draft
from scrimp.rules.core.call import Call
from scrimp.rules.core.local_context import Here, family
from scrimp.rules.core.rule import FREE, INSIDE, SUM, WHOLE, Dims, Rule, Scratch, Talk
from scrimp.rules.ops.batch_norm import BATCH_NORM_RUNS

Of = Callable[[Call, Draft, str], tuple[Dims, Dims, Dims]]  # dims of the input, of the normalised part, of the statistics


def _rows(call: Call, draft: Draft, kind: str) -> tuple[Dims, Dims, Dims]:
    """Dims of the input, of the normalised part, and of the statistics."""
    shape, inner = call.shape("input"), len(call.arguments["normalized_shape"])
    rows = draft.dims(shape[: len(shape) - inner], kind)
    normalised = draft.dims(shape[len(shape) - inner :], WHOLE)
    draft.put("input", (*rows, *normalised))
    draft.put("weight", normalised)
    draft.put("bias", normalised)
    return (*rows, *normalised), normalised, (*rows, *[()] * inner)


def _wanted(call: Call, outputs: tuple[Dims, ...]) -> list[Dims | None]:
    return [dims if mask else None for dims, mask in zip(outputs, call.arguments["output_mask"], strict=False)]


def _groups(call: Call, draft: Draft, kind: str) -> tuple[Dims, Dims, Dims]:
    shape, groups = call.shape("input"), call.arguments["group"]
    n, g = draft.dim(shape[0], kind), draft.dim(groups)
    channels = (*g, *draft.dim(shape[1] // groups, WHOLE))
    dims = (n, channels, *draft.dims(shape[2:], WHOLE))
    draft.put("input", dims)
    draft.put("weight", (channels,))
    draft.put("bias", (channels,))
    return dims, (channels,), (n, g)


def _forward(of: Of, call: Call) -> Rule:
    draft = Draft(call)
    dims, _, statistics = of(call, draft, FREE)
    return draft.rule(dims, *[statistics] * (len(call.op.outputs) - 1))


def _backward(of: Of, call: Call) -> Rule:
    draft = Draft(call)
    dims, normalised, statistics = of(call, draft, SUM)
    draft.put("grad_out", dims)
    draft.put("mean", statistics)
    draft.put("rstd", statistics)
    return draft.rule(*_wanted(call, (dims, normalised, normalised)), linear=[("grad_out",)])


def _local_groups(here: Here) -> dict[str, Any]:
    n, channels, *_ = here.of("input")
    return {"N": here.size(n), "C": here.size(channels), "group": here.call.arguments["group"] // here.count(channels)}


def _batch_norm(call: Call) -> Rule | None:
    """In training the statistics are all-reduced. In evaluation it is element-wise."""
    training = call.arguments.get("training", not call.op.target.endswith("no_training.default"))
    if training and call.op.target == "aten.native_batch_norm.default" and call.at("running_mean") is not None:
        return None  # writes into its operands
    draft, shape = Draft(call), call.shape("input")
    dims = tuple(draft.dim(size, INSIDE if training and index != 1 else FREE) for index, size in enumerate(shape))
    draft.put("input", dims)
    for name in ("weight", "bias", "running_mean", "running_var"):
        draft.put(name, (dims[1],))
    outputs = [None if made is None else (dims[1],) if made == shape[1:2] else draft.dims(made, WHOLE) for made in call.made[1:]]
    return draft.rule(dims, *outputs, talks=_talks(call, dims) if training else (), scratch=_deviations(call, dims, training))


def _batch_norm_backward(call: Call) -> Rule:
    training = call.arguments["train"]
    draft, shape = Draft(call), call.shape("input")
    dims = tuple(draft.dim(size, FREE if index == 1 else INSIDE if training else SUM) for index, size in enumerate(shape))
    draft.put("input", dims)
    draft.put("grad_out", dims)
    for name in ("weight", "running_mean", "running_var", "save_mean", "save_invstd"):
        if call.at(name) is not None and call.shape(name) == shape[1:2]:
            draft.put(name, (dims[1],))
    outputs = _wanted(call, (dims, (dims[1],), (dims[1],)))
    talks, scratch = _talks(call, dims) if training else (), _deviations(call, dims, training)
    return draft.rule(*outputs, linear=[("grad_out",)], talks=talks, scratch=scratch)


def _deviations(call: Call, dims: Dims, training: bool) -> list[Scratch]:
    """The deviations from the mean, or their squares; in low precision the result in float32 too."""
    spread = tuple(factor for index, dim in enumerate(dims) if index != 1 for factor in dim)
    low = call.dtypes[call.at("input") or 0] in ("bfloat16", "float16")
    every = tuple(factor for dim in dims for factor in dim)
    return [Scratch(when=spread, of=every, itemsize=call.itemsize("input"), times=1 + low)] if training else []


def _talks(call: Call, dims: Dims) -> list[Talk]:
    """Two numbers per channel."""
    spread = [factor for index, dim in enumerate(dims) if index != 1 for factor in dim]
    return [Talk(factor=factor, of=dims[1], itemsize=call.itemsize("input"), times=2) for factor in spread]


NORMS = family(
    {
        **dict.fromkeys(("aten.native_layer_norm.default", "aten._fused_rms_norm.default"), partial(_forward, _rows)),
        **dict.fromkeys(
            ("aten.native_layer_norm_backward.default", "aten._fused_rms_norm_backward.default"), partial(_backward, _rows)
        ),
        "aten.native_group_norm.default": partial(_forward, _groups),
        "aten.native_group_norm_backward.default": partial(_backward, _groups),
        **dict.fromkeys(
            (
                "aten.native_batch_norm.default",
                "aten._native_batch_norm_legit.no_stats",
                "aten._native_batch_norm_legit_functional.default",
                "aten._native_batch_norm_legit_no_training.default",
            ),
            _batch_norm,
        ),
        "aten.native_batch_norm_backward.default": _batch_norm_backward,
    },
    literals=dict.fromkeys(("aten.native_group_norm.default", "aten.native_group_norm_backward.default"), _local_groups),
    runs=BATCH_NORM_RUNS,
)
