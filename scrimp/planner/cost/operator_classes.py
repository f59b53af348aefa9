"""The class of an operator, whose rate on a device is measured as one (`scrimp probe --operators`)."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from scrimp.capture import Op, Value

_MATMULS = (
    "mm",
    "bmm",
    "addmm",
    "baddbmm",
    "addbmm",
    "mv",
    "addmv",
    "dot",
    "vdot",
    "_grouped_mm",
    "ragged_linear",
    "ragged_outer",
)
_NORMS = ("layer_norm", "batch_norm", "group_norm", "rms_norm")
_LOOKUPS = ("embedding", "index", "gather", "scatter", "take")
_SOFTMAXES = ("softmax", "nll_loss", "cross_entropy")
_REDUCTIONS = (
    "sum",
    "mean",
    "amax",
    "amin",
    "max",
    "min",
    "argmax",
    "argmin",
    "var",
    "var_mean",
    "norm",
    "linalg_vector_norm",
    "prod",
)
_CAUSAL = {  # positions of `is_causal` that differ from those of flash attention
    "_scaled_dot_product_flash_attention_for_cpu_backward": 7, "_scaled_dot_product_efficient_attention": 6,
}  # fmt: skip


def class_of(op: Op, values: Mapping[str, Value]) -> str:
    """One of `scrimp.cluster.CLASSES`. What has no class of its own is bound by memory as pointwise operators are."""
    name = op.target.partition(".")[2].partition(".")[0]
    behind = ", backward" if "backward" in name else ""
    if name in _MATMULS:
        return "matmul"
    if "scaled_dot_product" in name:
        return f"{'causal ' if _causal(op) else ''}attention{behind}"
    if "convolution" in name:
        return f"convolution{behind}"
    if any(each in name for each in _NORMS):
        return f"normalization{behind}"
    if any(each in name for each in _SOFTMAXES):
        return "softmax"
    if any(name.startswith(each) or f"_{each}" in name for each in _LOOKUPS):
        return f"lookup{behind}"
    if name in _REDUCTIONS:
        return "reduction of rows" if _over_rows(op) else "reduction"
    if name in ("cat", "stack"):
        return "concatenation"
    if name in ("clone", "contiguous"):  # copies that change nothing are not in a captured graph
        return "transposing copy"
    if name == "_to_copy":
        return "cast"
    sizes = {prod(values[each].shape) for each in op.inputs}
    return "broadcast" if len(sizes - {1}) > 1 else "pointwise"


def _over_rows(op: Op) -> bool:
    """Whether the last dim stays, as in the gradient of a bias: its elements are next to each other in memory."""
    dims = op.args[1] if len(op.args) > 1 else dict(op.kwargs).get("dim")
    return isinstance(dims, (list, tuple)) and bool(dims) and dims[0] == 0


def _causal(op: Op) -> bool:
    if dict(op.kwargs).get("is_causal"):
        return True
    name = op.target.partition(".")[2].partition(".")[0]
    position = _CAUSAL.get(name, 11 if "backward" in name else 4)
    return len(op.args) > position and op.args[position] is True
