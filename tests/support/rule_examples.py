"""Calls of operators, to try rules on: small, with sizes that 2, 3 and 4 divide, and some that they do not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

import scrimp.zoo.ragged  # noqa: F401  # registers its operators
from scrimp.capture.graph.graph import Named, Op, Ref, Value

INTS, BOOLS = "int64", "bool"


@dataclass(frozen=True)
class T:
    """A tensor among an example's arguments; those with the same `name` are one."""

    shape: tuple[int, ...]
    dtype: str = "float32"
    name: str = ""


def t(*shape: int) -> T:
    return T(shape)


def ids(*shape: int) -> T:
    return T(shape, INTS)


def made(target: str, *args: Any, **kwargs: Any) -> tuple[Op, dict[str, Value]]:
    """The captured form of a call, its outputs' shapes being those that torch makes."""
    values: dict[str, Value] = {}

    def value(name: str, shape: tuple[int, ...], dtype: str, kind: str) -> Ref:
        values[name] = Value(name=name, shape=shape, dtype=dtype, storage=name, kind=kind)
        return Ref(name=name)

    def refs(argument: Any) -> Any:
        if isinstance(argument, T):
            return value(argument.name or f"in{len(values)}", argument.shape, argument.dtype, "border")
        return tuple(map(refs, argument)) if isinstance(argument, (list, tuple)) else argument

    def tensors(argument: Any) -> Any:
        if isinstance(argument, T):
            return torch.zeros(argument.shape, dtype=getattr(torch, argument.dtype))
        if isinstance(argument, Named):
            return getattr(torch, argument.name)
        return list(map(tensors, argument)) if isinstance(argument, (list, tuple)) else argument

    library, name, overload = target.split(".")
    function = getattr(getattr(getattr(torch.ops, library), name), overload)
    outputs = function(*map(tensors, args), **{key: tensors(each) for key, each in kwargs.items()})
    op_args, op_kwargs = tuple(map(refs, args)), tuple((key, refs(each)) for key, each in kwargs.items())
    names = []
    for index, output in enumerate(outputs if isinstance(outputs, (tuple, list)) else (outputs,)):
        if isinstance(output, torch.Tensor):
            value(f"out{index}", tuple(output.shape), str(output.dtype).removeprefix("torch."), "made")
        names.append(f"out{index}" if isinstance(output, torch.Tensor) else None)
    op = Op(
        name="out0",
        target=target,
        args=op_args,
        kwargs=op_kwargs,
        outputs=tuple(names),
        backward=False,
        cell=0,
        flops=0,
        where="",
    )
    return op, values


FLOAT = Named(what="dtype", name="float32")
LONG = Named(what="dtype", name="int64")
_FLASH = "aten._scaled_dot_product_flash_attention_for_cpu"
_BN = "aten._native_batch_norm_legit_functional.default"
_QKV = (t(2, 4, 6, 8), t(2, 4, 6, 8), t(2, 4, 6, 8))
_CONV = ([1, 1], [1, 1], [1, 1])
_ALL = [True, True, True]

# Target, arguments, named arguments.
EXAMPLES: tuple[tuple[str, tuple[Any, ...], dict[str, Any]], ...] = (
    # contraction
    ("aten.mm.default", (t(4, 6), t(6, 12)), {}),
    ("aten.addmm.default", (t(12), t(4, 6), t(6, 12)), {}),
    ("aten.addmm.default", (t(4, 1), t(4, 6), t(6, 12)), {"alpha": 2.0, "beta": 0.5}),
    ("aten.bmm.default", (t(4, 6, 8), t(4, 8, 3)), {}),
    ("aten.baddbmm.default", (t(4, 1, 3), t(4, 6, 8), t(4, 8, 3)), {}),
    ("aten.linear.default", (t(2, 4, 6), t(8, 6), t(8)), {}),
    ("aten.linear.default", (t(4, 6), t(8, 6)), {}),
    ("aten.dot.default", (t(12), t(12)), {}),
    ("aten.mv.default", (t(4, 12), t(12)), {}),
    ("aten.convolution.default", (t(4, 6, 5, 5), t(8, 6, 3, 3), t(8), *_CONV, False, [0, 0], 1), {}),
    ("aten.convolution.default", (t(4, 8, 5, 5), t(12, 2, 3, 3), None, [2, 2], [1, 1], [1, 1], False, [0, 0], 4), {}),
    ("aten.convolution.default", (t(4, 6, 5, 5), t(6, 8, 3, 3), t(8), *_CONV, True, [0, 0], 1), {}),
    ("aten.convolution.default", (t(4, 8, 5, 5), t(8, 3, 3, 3), t(12), *_CONV, True, [0, 0], 4), {}),
    ("aten.convolution_backward.default", (t(4, 8, 5, 5), t(4, 6, 5, 5), t(8, 6, 3, 3), [8], *_CONV, False, [0, 0], 1, _ALL), {}),
    (
        "aten.convolution_backward.default",
        (t(4, 12, 5, 5), t(4, 8, 5, 5), t(12, 2, 3, 3), [12], *_CONV, False, [0, 0], 4, _ALL),
        {},
    ),
    (
        "aten.convolution_backward.default",
        (t(4, 12, 5, 5), t(4, 8, 5, 5), t(8, 3, 3, 3), [0], *_CONV, True, [0, 0], 4, [True, True, False]),
        {},
    ),
    ("aten._grouped_mm.default", (t(12, 24), t(6, 24, 24), T((6,), "int32")), {}),
    ("aten._grouped_mm.default", (t(12, 24), t(24, 24), T((6,), "int32")), {}),
    ("aten._grouped_mm.default", (t(6, 12, 24), t(6, 24, 24)), {}),
    ("scrimp.ragged_linear.default", (t(4, 6, 12, 8), ids(4, 6, 3), t(6, 3, 8, 24), t(6, 3, 24), 12), {}),
    ("scrimp.ragged_linear.default", (t(4, 6, 12, 8), ids(4, 6, 3), t(6, 3, 8, 24), None, 12), {}),
    ("scrimp.ragged_outer.default", (t(4, 6, 12, 8), t(4, 6, 12, 24), ids(4, 6, 3), 12), {}),
    # attention
    (f"{_FLASH}.default", (*_QKV,), {}),
    (f"{_FLASH}.default", (*_QKV, 0.0, True), {"scale": 0.5}),
    (f"{_FLASH}.default", (*_QKV,), {"attn_mask": t(2, 1, 6, 6)}),
    (f"{_FLASH}_backward.default", (t(2, 4, 6, 8), *_QKV, t(2, 4, 6, 8), t(2, 4, 6), 0.0, True), {}),
    (f"{_FLASH}_backward.default", (t(2, 4, 6, 8), *_QKV, t(2, 4, 6, 8), t(2, 4, 6), 0.0, False), {"attn_mask": t(6, 6)}),
    # pointwise
    *(
        (f"aten.{name}.Tensor", (t(4, 6), t(4, 6)), {})
        for name in ("add", "sub", "mul", "div", "eq", "ne", "le", "lt", "ge", "gt")
    ),
    ("aten.add.Tensor", (t(4, 1, 6), t(12, 1)), {"alpha": 2}),
    ("aten.add.Tensor", (t(4, 6), 3.0), {}),
    ("aten.mul.Tensor", (t(4, 6), T((4, 6), BOOLS)), {}),
    ("aten.mul.Tensor", (T((4, 6), name="x"), T((4, 6), name="x")), {}),
    *(
        (f"aten.{name}.Scalar", (t(4, 6), 2.0), {})
        for name in ("add", "sub", "mul", "div", "eq", "ne", "le", "lt", "ge", "gt", "rsub")
    ),
    *(
        (f"aten.{name}.default", (t(4, 6),), {})
        for name in (
            *("neg", "exp", "log", "sqrt", "rsqrt", "reciprocal", "tanh", "sigmoid", "relu", "silu", "gelu", "erf", "cos", "sin"),
            *("abs", "sign", "clone", "alias", "detach", "isnan", "isinf", "logical_not", "_to_copy", "square", "softplus"),
            *("leaky_relu", "elu", "hardtanh", "hardswish", "log1p", "floor", "contiguous"),
        )
    ),
    ("aten._to_copy.default", (t(4, 6),), {"dtype": LONG}),
    ("aten._to_copy.default", (T((4, 6), BOOLS),), {"dtype": FLOAT}),
    ("aten.pow.Tensor_Scalar", (t(4, 6), 2), {}),
    ("aten.pow.Tensor_Tensor", (t(4, 6), t(6)), {}),
    ("aten.bitwise_and.Tensor", (T((4, 6), BOOLS), T((4, 1), BOOLS)), {}),
    ("aten.bitwise_or.Tensor", (T((4, 6), BOOLS), T((6,), BOOLS)), {}),
    ("aten.bitwise_not.default", (T((4, 6), BOOLS),), {}),
    ("aten.logical_and.default", (T((4, 6), BOOLS), T((6,), BOOLS)), {}),
    ("aten.floor_divide.default", (ids(4, 6), 3), {}),
    ("aten.div.Tensor_mode", (ids(4, 6), 3), {"rounding_mode": "floor"}),
    ("aten.remainder.Scalar", (ids(4, 6), 3), {}),
    ("aten.clamp.default", (t(4, 6), -0.5, 0.5), {}),
    ("aten.clamp_min.default", (t(4, 6), 0.0), {}),
    ("aten.maximum.default", (t(4, 6), t(6)), {}),
    ("aten.where.self", (T((4, 1), BOOLS), t(4, 6), t()), {}),
    ("aten.where.ScalarOther", (T((4, 6), BOOLS), t(4, 6), 0.0), {}),
    ("aten.masked_fill.Scalar", (t(4, 6), T((4, 1), BOOLS), 0.0), {}),
    ("aten.masked_fill.Tensor", (t(4, 6), T((4, 1), BOOLS), t()), {}),
    ("aten.addcmul.default", (t(4, 6), t(6), t(4, 1)), {"value": 2.0}),
    *((f"aten.{name}_backward.default", (t(4, 6), t(4, 6)), {}) for name in ("tanh", "sigmoid", "silu", "gelu")),
    ("aten.gelu_backward.default", (t(4, 6), t(4, 6)), {"approximate": "tanh"}),
    ("aten.threshold_backward.default", (t(4, 6), t(4, 6), 0.0), {}),
    ("aten.hardtanh_backward.default", (t(4, 6), t(4, 6), -1.0, 1.0), {}),
    ("aten.leaky_relu_backward.default", (t(4, 6), t(4, 6), 0.1, False), {}),
    ("aten.elu_backward.default", (t(4, 6), 1.0, 1.0, 1.0, False, t(4, 6)), {}),
    ("aten.softplus_backward.default", (t(4, 6), t(4, 6), 1.0, 20.0), {}),
    *((f"aten.{name}_backward.default", (t(4, 6), t(4, 6)), {}) for name in ("hardsigmoid", "hardswish", "mish")),
    ("aten.where.ScalarSelf", (T((4, 6), BOOLS), 1.0, t(4, 6)), {}),
    ("aten.where.Scalar", (T((4, 6), BOOLS), 1.0, 2.0), {}),
    ("aten.lift_fresh_copy.default", (t(4, 6),), {}),
    ("aten.native_dropout.default", (t(4, 12), 0.3, True), {}),
    ("aten.native_dropout_backward.default", (t(4, 6), T((4, 6), BOOLS), 1.5), {}),
    ("aten.copy.default", (t(4, 6), t(4, 6)), {}),
    ("aten.copy.default", (t(4, 6), t(6)), {}),
    ("aten.copy.default", (ids(4, 6), t(4, 6)), {}),
    ("aten.fill.Scalar", (t(4, 6), 2.0), {}),
    ("aten.fill.Tensor", (t(4, 6), t()), {}),
    # reductions
    ("aten.histc.default", (t(12), 6, -1, 2), {}),
    ("aten.histc.default", (t(4, 6), 4), {}),
    ("aten.sum.default", (t(4, 6),), {}),
    ("aten.sum.default", (T((4, 6), BOOLS),), {}),
    ("aten.sum.dim_IntList", (t(4, 6, 8), [0, -1]), {}),
    ("aten.sum.dim_IntList", (t(4, 6, 8), [1], True), {}),
    ("aten.mean.default", (t(4, 6),), {}),
    ("aten.mean.dim", (t(4, 6, 8), [-1], True), {}),
    ("aten.mean.dim", (t(4, 6, 8, 3), [-1, -2]), {}),
    *((f"aten.{name}.default", (t(4, 6, 8), [-1]), {}) for name in ("amax", "amin")),
    ("aten.amax.default", (t(4, 6), [], True), {}),
    *((f"aten.{name}.default", (T((4, 6), BOOLS),), {}) for name in ("any", "all")),
    *((f"aten.{name}.dim", (T((4, 6), BOOLS), 1), {}) for name in ("any", "all")),
    *((f"aten.{name}.dims", (T((4, 6, 8), BOOLS), [0, 2], True), {}) for name in ("any", "all")),
    *((f"aten.{name}.dim", (t(4, 6, 8), 1), {}) for name in ("max", "min")),
    *((f"aten.{name}.default", (t(4, 6),), {}) for name in ("max", "min", "argmax", "argmin", "prod")),
    ("aten.argmax.default", (t(4, 6), -1, True), {}),
    ("aten.prod.dim_int", (t(4, 6), 1), {}),
    ("aten.logsumexp.default", (t(4, 6), [1]), {}),
    ("aten.linalg_vector_norm.default", (t(4, 6), 2, [1], True), {}),
    ("aten.var.correction", (t(4, 6), [1]), {"correction": 0, "keepdim": True}),
    ("aten.var_mean.correction", (t(4, 6), [1]), {"correction": 0, "keepdim": True}),
    ("aten.var_mean.dim", (t(4, 6), [1]), {}),
    ("aten.var.dim", (t(4, 6), [1]), {}),
    ("aten.std.correction", (t(4, 6), [1]), {}),
    ("aten.cumsum.default", (t(4, 6), 1), {}),
    ("aten.cumsum.default", (ids(4, 6), -1), {}),
    ("aten.cumprod.default", (t(4, 6), 0), {}),
    ("aten.topk.default", (t(4, 6, 8), 2), {}),
    ("aten.topk.default", (t(4, 6), 2, 0), {}),
    ("aten.sort.default", (t(4, 6), 1), {}),
    ("aten.sort.stable", (t(4, 6),), {"stable": True, "dim": 1}),
    ("aten.argsort.default", (t(4, 6), 1), {}),
    # softmax and losses
    *((f"aten.{name}.default", (t(4, 6, 12), -1, False), {}) for name in ("_softmax", "_log_softmax")),
    ("aten._softmax.default", (t(4, 12, 6), 1, False), {}),
    ("aten._safe_softmax.default", (t(4, 6, 12), -1), {}),
    *(
        (f"aten.{name}.default", (t(4, 12), t(4, 12), 1, FLOAT), {})
        for name in ("_softmax_backward_data", "_log_softmax_backward_data")
    ),
    *(("aten.nll_loss_forward.default", (t(12, 6), ids(12), None, reduction, -100), {}) for reduction in (0, 1, 2)),
    ("aten.nll_loss_forward.default", (t(12, 6), ids(12), t(6), 1, 0), {}),
    ("aten.nll_loss2d_forward.default", (t(4, 6, 2, 2), ids(4, 2, 2), None, 1, -100), {}),
    ("aten.nll_loss_backward.default", (t(), t(12, 6), ids(12), None, 1, -100, t()), {}),
    ("aten.nll_loss_backward.default", (t(), t(12, 6), ids(12), t(6), 1, 0, t()), {}),
    ("aten.nll_loss_backward.default", (t(12), t(12, 6), ids(12), None, 0, 2, t()), {}),
    ("aten.nll_loss2d_backward.default", (t(), t(4, 6, 2, 2), ids(4, 2, 2), None, 1, -100, t()), {}),
    *(
        (f"aten.{name}.default", (t(4, 6), t(4, 6), reduction), {})
        for name in ("mse_loss", "huber_loss")
        for reduction in (0, 1, 2)
    ),
    *(
        ("aten.mse_loss_backward.default", (gradient, t(4, 6), t(4, 6), how), {})
        for gradient, how in ((t(4, 6), 0), (t(), 1), (t(), 2))
    ),
    ("aten.huber_loss_backward.default", (t(), t(4, 6), t(4, 6), 1, 0.5), {}),
    ("aten.smooth_l1_loss.default", (t(4, 6), t(4, 6), 1, 0.5), {}),
    ("aten.smooth_l1_loss_backward.default", (t(), t(4, 6), t(4, 6), 1, 0.5), {}),
    # norms
    ("aten.native_layer_norm.default", (t(4, 6, 8), [8], t(8), t(8), 1e-5), {}),
    ("aten.native_layer_norm.default", (t(4, 6, 8), [6, 8], None, None, 1e-5), {}),
    ("aten.native_layer_norm_backward.default", (t(4, 6, 8), t(4, 6, 8), [8], t(4, 6, 1), t(4, 6, 1), t(8), t(8), _ALL), {}),
    ("aten.native_layer_norm_backward.default", (t(4, 8), t(4, 8), [8], t(4, 1), t(4, 1), t(8), None, [True, True, False]), {}),
    ("aten._fused_rms_norm.default", (t(4, 6, 8), [8], t(8), 1e-5), {}),
    ("aten.native_group_norm.default", (t(4, 12, 3), t(12), t(12), 4, 12, 3, 6, 1e-5), {}),
    ("aten.native_group_norm_backward.default", (t(4, 12, 3), t(4, 12, 3), t(4, 6), t(4, 6), t(12), 4, 12, 3, 6, _ALL), {}),
    (_BN, (t(4, 6, 3, 2), t(6), t(6), t(6), t(6), True, 0.1, 1e-5), {}),
    (_BN, (t(12, 6), t(6), t(6), t(6), t(6), False, 0.1, 1e-5), {}),
    ("aten._native_batch_norm_legit_no_training.default", (t(4, 6, 3), t(6), t(6), t(6), t(6), 0.1, 1e-5), {}),
    ("aten._native_batch_norm_legit.no_stats", (t(4, 6, 3), None, t(6), True, 0.1, 1e-5), {}),
    ("aten.native_batch_norm.default", (t(4, 6, 4), t(6), t(6), None, None, True, 0.1, 1e-5), {}),
    ("aten.native_batch_norm.default", (t(4, 6, 4), t(6), t(6), t(6), t(6), False, 0.1, 1e-5), {}),
    ("aten.native_batch_norm_backward.default", (t(4, 6, 4), t(4, 6, 4), t(6), t(6), t(6), t(6), t(6), True, 1e-5, _ALL), {}),
    ("aten.native_batch_norm_backward.default", (t(4, 6), t(4, 6), t(6), t(6), t(6), None, None, False, 1e-5, _ALL), {}),
    # views
    *((f"aten.{name}.default", (t(4, 6, 12), [24, 3, 4]), {}) for name in ("view", "_unsafe_view", "reshape")),
    ("aten.view.default", (t(24, 12), [4, -1, 2, 6]), {}),
    ("aten.view.default", (t(6, 4), [8, 3]), {}),
    ("aten.view.default", (t(12, 1, 4), [2, 24]), {}),
    ("aten.view.default", (t(1, 1), []), {}),
    ("aten.t.default", (t(4, 6),), {}),
    ("aten.transpose.int", (t(4, 6, 8), 1, -1), {}),
    ("aten.permute.default", (t(4, 6, 8), [2, 0, -2]), {}),
    ("aten.expand.default", (t(4, 1, 6), [8, -1, 12, 6]), {}),
    ("aten.unsqueeze.default", (t(4, 6), -1), {}),
    ("aten.squeeze.default", (t(2, 1, 6),), {}),
    ("aten.squeeze.dim", (t(2, 1, 6), 0), {}),
    ("aten.squeeze.dim", (t(2, 1, 6), 1), {}),
    ("aten.squeeze.dims", (t(2, 1, 6, 1), [1, 2]), {}),
    ("aten.repeat.default", (t(4, 6), [2, 3, 1]), {}),
    ("aten.flip.default", (t(4, 6), [0]), {}),
    ("aten.roll.default", (t(4, 6), [1], [0]), {}),
    ("aten.tril.default", (t(4, 6, 6),), {}),
    ("aten.tril.default", (T((6, 6), BOOLS),), {}),
    ("aten.triu.default", (t(4, 6, 6), 1), {}),
    # pieces
    ("aten.split.Tensor", (t(4, 24), 8, -1), {}),
    ("aten.split.Tensor", (t(10, 4), 4), {}),
    ("aten.unsafe_split.Tensor", (t(4, 24), 8, -1), {}),
    ("aten.split_with_sizes.default", (t(4, 24), [16, 4, 4], 1), {}),
    ("aten.unbind.int", (t(3, 4, 6),), {}),
    ("aten.select.int", (t(4, 6, 8), 1, -1), {}),
    ("aten.select_backward.default", (t(4, 8), [4, 6, 8], 1, 2), {}),
    ("aten.slice.Tensor", (t(4, 24), 1, 8, 16), {}),
    ("aten.slice.Tensor", (t(4, 24), 1, 12, 9223372036854775807), {}),
    ("aten.slice.Tensor", (t(4, 24), 0, 0, 9223372036854775807), {}),
    ("aten.slice.Tensor", (t(4, 24), -1, -7, 24), {}),
    ("aten.slice.Tensor", (t(4, 24), 1, 0, 24, 2), {}),
    ("aten.slice_backward.default", (t(4, 8), [4, 24], 1, 8, 16, 1), {}),
    ("aten.slice_backward.default", (t(4, 23), [4, 24], 1, 1, 9223372036854775807, 1), {}),
    ("aten.slice_scatter.default", (t(4, 24), t(4, 8), 1, 8, 16), {}),
    ("aten.select_scatter.default", (t(4, 6), t(4), 1, 2), {}),
    ("aten.cat.default", ([t(4, 12), t(4, 12)], -1), {}),
    ("aten.cat.default", ([t(4, 8), t(4, 4), t(4, 12)], 1), {}),
    ("aten.cat.default", ([T((4, 6), name="x"), T((4, 6), name="x")],), {}),
    ("aten.stack.default", ([t(4, 6), t(4, 6)], 1), {}),
    ("aten.constant_pad_nd.default", (t(4, 6), [0, 1]), {}),
    ("aten.constant_pad_nd.default", (t(4, 6, 12), [4, -4, 0, 0], 2.0), {}),
    # gather and scatter
    ("aten.embedding.default", (t(12, 6), ids(4, 3)), {}),
    ("aten.embedding.default", (t(12, 6), ids(4, 3), 2), {}),
    ("aten.embedding_dense_backward.default", (t(4, 3, 6), ids(4, 3), 12, -1, False), {}),
    ("aten.embedding_dense_backward.default", (t(8, 6), ids(8), 12, 2, False), {}),
    ("aten.embedding_dense_backward.default", (t(8, 6), ids(8), 12, -1, True), {}),
    ("aten.index.Tensor", (t(12, 6), [ids(4)]), {}),
    ("aten.index.Tensor", (t(4, 12, 6), [None, ids(4, 2)]), {}),
    ("aten.index.Tensor", (t(4, 6, 8), [ids(4, 1), ids(6)]), {}),
    ("aten.index.Tensor", (t(4, 6, 8), [ids(4), None, ids(4)]), {}),
    ("aten.index.Tensor", (ids(12, 6), [ids(4)]), {}),
    ("aten.index_put.default", (t(12, 6), [ids(4)], t(4, 6), True), {}),
    ("aten.index_put.default", (t(12, 6), [ids(4)], t(4, 6), False), {}),
    ("aten.index_put.default", (t(4, 6), [ids(8), ids(8)], t(8), True), {}),
    ("aten._unsafe_index_put.default", (t(12, 6), [ids(4)], t(4, 6), True), {}),
    ("aten._unsafe_index.Tensor", (t(12, 6), [ids(4)]), {}),
    ("aten.index_add.default", (t(12, 6), 0, ids(4), t(4, 6)), {}),
    ("aten.index_select.default", (t(4, 12), 1, ids(6)), {}),
    ("aten.gather.default", (t(4, 12), 1, ids(4, 6)), {}),
    ("aten.gather.default", (t(4, 12), 0, ids(2, 12)), {}),
    ("aten.gather.default", (ids(4, 12), 1, ids(4, 6)), {}),
    ("aten.scatter.src", (t(4, 12), 1, ids(4, 6), t(4, 6)), {}),
    ("aten.scatter.value", (t(4, 12), 1, ids(4, 6), 1.0), {}),
    ("aten.scatter_add.default", (t(4, 12), 1, ids(4, 6), t(4, 6)), {}),
    ("aten.one_hot.default", (ids(4, 6), 8), {}),
    # factories
    *((f"aten.{name}.default", ([4, 6],), {}) for name in ("zeros", "ones", "rand", "randn")),
    ("aten.empty.memory_format", ([4, 6],), {}),
    ("aten.full.default", ([4, 6], 2.0), {}),
    *((f"aten.{name}.default", (t(4, 6),), {}) for name in ("zeros_like", "ones_like", "empty_like", "rand_like", "randn_like")),
    ("aten.full_like.default", (t(4, 6), 2.0), {}),
    *((f"aten.{name}.default", (t(3, 2), [4, 6]), {}) for name in ("new_zeros", "new_ones", "new_empty")),
    ("aten.new_full.default", (t(3, 2), [4, 6], 3.0), {}),
    ("aten.bernoulli.p", (t(4, 6), 0.5), {}),
    ("aten.bernoulli.default", (t(4, 6),), {}),
    ("aten.arange.default", (12,), {}),
    ("aten.arange.start", (2, 14), {}),
    ("aten.arange.start_step", (2, 26, 2), {"dtype": FLOAT}),
    ("aten.scalar_tensor.default", (2.0,), {"dtype": FLOAT}),
    ("aten.linspace.default", (0.0, 1.0, 12), {}),
    ("aten.eye.default", (6,), {}),
    ("aten.eye.m", (4, 6), {}),
    # pooling
    ("aten.max_pool2d_with_indices.default", (t(4, 6, 8, 8), [3, 3], [2, 2], [1, 1]), {}),
    (
        "aten.max_pool2d_with_indices_backward.default",
        (t(4, 6, 4, 4), t(4, 6, 8, 8), [3, 3], [2, 2], [1, 1], [1, 1], False, ids(4, 6, 4, 4)),
        {},
    ),
    ("aten.avg_pool2d.default", (t(4, 6, 8, 8), [2, 2]), {}),
    ("aten.avg_pool2d_backward.default", (t(4, 6, 4, 4), t(4, 6, 8, 8), [2, 2], [], [0, 0], False, True, None), {}),
    ("aten._adaptive_avg_pool2d.default", (t(4, 6, 8, 8), [2, 2]), {}),
    ("aten._adaptive_avg_pool2d_backward.default", (t(4, 6, 2, 2), t(4, 6, 8, 8)), {}),
    ("aten.upsample_nearest2d.vec", (t(4, 6, 2, 2), None, [2.0, 2.0]), {}),
    ("aten.upsample_bilinear2d.vec", (t(4, 6, 2, 2), None, True, [2.0, 2.0]), {}),
    ("aten.upsample_nearest2d.default", (t(4, 6, 2, 2), [4, 4]), {}),
    ("aten.upsample_bilinear2d.default", (t(4, 6, 2, 2), [4, 4], True), {}),
    ("aten.upsample_nearest2d_backward.default", (t(4, 6, 4, 4), [4, 4], [4, 6, 2, 2]), {}),
    ("aten.upsample_bilinear2d_backward.default", (t(4, 6, 4, 4), [4, 4], [4, 6, 2, 2], True), {}),
)
