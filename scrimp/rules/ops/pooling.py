"""Pooling and resizing of images: batch and channels may be split, spatial dims not."""

from __future__ import annotations

from functools import partial
from typing import Any

from scrimp.rules.core.builder import Draft
from scrimp.rules.core.call import Call
from scrimp.rules.core.local_context import Here, family
from scrimp.rules.core.rule import WHOLE, Dims, Rule


def _pool(spatial: int, call: Call) -> Rule | None:
    """All tensors share the dims before the spatial ones."""
    if any(len(shape) < spatial for shape in call.shapes):
        return None
    draft, leading = Draft(call), call.shapes[0][: len(call.shapes[0]) - spatial]
    before = draft.dims(leading)

    def placed(shape: tuple[int, ...]) -> Dims:
        return (*before, *draft.dims(shape[len(leading) :], WHOLE))

    for index, shape in enumerate(call.shapes):
        draft.inputs[index] = placed(shape)
    linear = (
        [("grad_output",)] if "backward" in call.op.target else [] if "max_pool" in call.op.target else [("self",), ("input",)]
    )
    return draft.rule(*[None if made is None else placed(made) for made in call.made], linear=linear)


def _local_input_size(here: Here) -> dict[str, Any]:
    return {"input_size": here.shape(here.rule.outputs[0])}


_RESIZED_BACK = ("aten.upsample_nearest2d_backward.default", "aten.upsample_bilinear2d_backward.default")
_FLAT = (
    "aten.max_pool2d_with_indices.default",
    "aten.max_pool2d_with_indices_backward.default",
    "aten.avg_pool2d.default",
    "aten.avg_pool2d_backward.default",
    "aten._adaptive_avg_pool2d.default",
    "aten._adaptive_avg_pool2d_backward.default",
    "aten.upsample_nearest2d.default",
    "aten.upsample_nearest2d.vec",
    "aten.upsample_bilinear2d.default",
    "aten.upsample_bilinear2d.vec",
    *_RESIZED_BACK,
)

POOLING = family(dict.fromkeys(_FLAT, partial(_pool, 2)), literals=dict.fromkeys(_RESIZED_BACK, _local_input_size))
