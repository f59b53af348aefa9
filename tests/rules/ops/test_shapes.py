"""Rules over shapes, meshes and choices that hypothesis draws, family by family."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scrimp.layout import Mesh
from scrimp.rules import check, may_split, rule_of
from tests.support.rule_examples import BOOLS, FLOAT, T, ids, made, t

SIZES = st.sampled_from((1, 2, 3, 4, 6, 8, 12))
Call = tuple[Any, ...]


@st.composite
def shapes(draw: st.DrawFn, least: int = 1, most: int = 4) -> tuple[int, ...]:
    sizes: list[int] = []
    for _ in range(draw(st.integers(least, most))):
        sizes.append(draw(SIZES) if prod(sizes) < 200 else 2)
    return tuple(sizes)


@st.composite
def contraction(draw: st.DrawFn) -> Call:
    b, i, k, j = (draw(SIZES) for _ in range(4))
    kind = draw(st.sampled_from(("mm", "addmm", "bmm", "baddbmm", "linear", "convolution", "convolution_backward", "attention")))
    if kind in ("mm", "bmm"):
        batch = () if kind == "mm" else (b,)
        return f"aten.{kind}.default", T((*batch, i, k)), T((*batch, k, j))
    if kind == "addmm":
        return "aten.addmm.default", T(draw(st.sampled_from(((j,), (1, j), (i, 1), (i, j), (1,))))), t(i, k), t(k, j)
    if kind == "baddbmm":
        return "aten.baddbmm.default", T(draw(st.sampled_from(((b, 1, j), (1, i, j), (b, i, j), (j,))))), t(b, i, k), t(b, k, j)
    if kind == "linear":
        return "aten.linear.default", T((*draw(shapes(0, 2)), k)), t(j, k), draw(st.sampled_from((None, t(j))))
    if kind == "attention":
        causal = draw(st.booleans())
        return "aten._scaled_dot_product_flash_attention_for_cpu.default", *[t(b, i, k, 8)] * 3, 0.0, causal
    groups = draw(st.sampled_from((1, 2, 4)))
    x, w, y = t(b, groups * k, 5), t(groups * j, k, 3), t(b, groups * j, 5)
    settings = ([1], [1], [1], False, [0], groups)
    if kind == "convolution":
        return "aten.convolution.default", x, w, draw(st.sampled_from((None, t(groups * j)))), *settings
    return "aten.convolution_backward.default", y, x, w, [groups * j], *settings, [True, True, draw(st.booleans())]


@st.composite
def pointwise(draw: st.DrawFn) -> Call:
    shape = draw(shapes(0))
    first, second, third = (
        T(tuple(1 if draw(st.booleans()) else size for size in shape[draw(st.integers(0, len(shape))) :])) for _ in range(3)
    )
    kind = draw(
        st.sampled_from(("add.Tensor", "mul.Tensor", "sub.Tensor", "div.Tensor", "where.self", "addcmul.default", "gelu.default"))
    )
    if kind == "where.self":
        return "aten.where.self", T(first.shape, BOOLS), second, third
    if kind == "addcmul.default":
        return "aten.addcmul.default", first, second, third
    return (f"aten.{kind}", first) if kind == "gelu.default" else (f"aten.{kind}", first, second)


@st.composite
def reductions(draw: st.DrawFn) -> Call:
    shape = draw(shapes())
    over = draw(st.lists(st.integers(-len(shape), len(shape) - 1), min_size=1, unique_by=lambda dim: dim % len(shape)))
    kind = draw(
        st.sampled_from(("sum.dim_IntList", "mean.dim", "amax.default", "amin.default", "any.dims", "cumsum.default", "max.dim"))
    )
    if kind in ("cumsum.default", "max.dim"):
        return f"aten.{kind}", T(shape), over[0]
    return f"aten.{kind}", T(shape, BOOLS if kind == "any.dims" else "float32"), over, draw(st.booleans())


@st.composite
def softmaxes(draw: st.DrawFn) -> Call:
    shape = draw(shapes())
    dim = draw(st.integers(-len(shape), len(shape) - 1))
    kind = draw(
        st.sampled_from(("_softmax", "_log_softmax", "_safe_softmax", "_softmax_backward_data", "_log_softmax_backward_data"))
    )
    if kind.endswith("data"):
        return f"aten.{kind}.default", T(shape), T(shape), dim, FLOAT
    return (f"aten.{kind}.default", T(shape), dim) if kind == "_safe_softmax" else (f"aten.{kind}.default", T(shape), dim, False)


@st.composite
def losses(draw: st.DrawFn) -> Call:
    rows, classes = draw(SIZES), draw(SIZES)
    weight, reduction, ignored = (
        draw(st.sampled_from((None, t(classes)))),
        draw(st.integers(0, 2)),
        draw(st.sampled_from((-100, 0, 1))),
    )
    if draw(st.booleans()):
        return "aten.nll_loss_forward.default", t(rows, classes), ids(rows), weight, reduction, ignored
    gradient = t(rows) if reduction == 0 else t()
    return "aten.nll_loss_backward.default", gradient, t(rows, classes), ids(rows), weight, reduction, ignored, t()


@st.composite
def norms(draw: st.DrawFn) -> Call:
    rows, inner, wanted = draw(shapes(1, 2)), draw(shapes(1, 2)), [True] * 3
    n, c, s = draw(SIZES), draw(SIZES), draw(SIZES)
    groups = draw(st.sampled_from([count for count in (1, 2, 3, 4) if c % count == 0]))
    weight = draw(st.sampled_from((None, T(inner))))
    kind = draw(st.integers(0, 5))
    if kind == 0:
        return "aten.native_layer_norm.default", T((*rows, *inner)), list(inner), weight, weight, 1e-5
    if kind == 1:
        statistics, x = T((*rows, *[1] * len(inner))), T((*rows, *inner))
        mask = wanted if weight is not None else [True, False, False]
        return "aten.native_layer_norm_backward.default", x, x, list(inner), statistics, statistics, weight, weight, mask
    if kind == 2:
        return "aten.native_group_norm.default", t(n, c, s), t(c), t(c), n, c, s, groups, 1e-5
    if kind == 3:
        x, statistics = t(n, c, s), t(n, groups)
        return "aten.native_group_norm_backward.default", x, x, statistics, statistics, t(c), n, c, s, groups, wanted
    if kind == 4:
        return "aten._native_batch_norm_legit_functional.default", t(2 * n, c, s), *[t(c)] * 4, draw(st.booleans()), 0.1, 1e-5
    return "aten.native_batch_norm_backward.default", *[t(2 * n, c, s)] * 2, *[t(c)] * 5, draw(st.booleans()), 1e-5, wanted


@st.composite
def views(draw: st.DrawFn) -> Call:
    """Any regrouping of the same primes; and what turns, stretches and repeats."""
    shape = draw(shapes())
    kind = draw(st.integers(0, 4))
    if kind == 0:
        primes = draw(
            st.permutations(
                [p for size in shape for p in {1: [1], 4: [2, 2], 6: [2, 3], 8: [2] * 3, 12: [3, 4]}.get(size, [size])]
            )
        )
        groups = [1] * draw(st.integers(1, 4))
        for prime in primes:
            groups[draw(st.integers(0, len(groups) - 1))] *= prime
        return "aten.view.default", T(shape), groups
    if kind == 1:
        return "aten.permute.default", T(shape), draw(st.permutations(range(len(shape))))
    if kind == 2:
        return "aten.expand.default", T(shape), [draw(SIZES), *(draw(SIZES) if size == 1 else -1 for size in shape)]
    if kind == 3:
        return "aten.repeat.default", T(shape), [draw(st.integers(1, 4)) for _ in range(len(shape) + draw(st.integers(0, 1)))]
    return "aten.squeeze.default", T(shape)


@st.composite
def pieces(draw: st.DrawFn) -> Call:
    shape = draw(shapes(1, 3))
    at = draw(st.integers(0, len(shape) - 1))
    unit, kind = draw(SIZES), draw(st.integers(0, 4))
    sizes = [unit * count for count in draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))]

    def sized(size: int) -> T:
        return T((*shape[:at], size, *shape[at + 1 :]))

    whole, start = sum(sizes), draw(st.integers(0, len(sizes) - 1))
    begin, end = sum(sizes[:start]), sum(sizes[: start + 1])
    if kind == 0:
        return "aten.split_with_sizes.default", sized(whole), sizes, at
    if kind == 1:
        return "aten.cat.default", [sized(size) for size in sizes], at
    if kind == 2:
        return "aten.slice.Tensor", sized(whole), at, begin - whole if draw(st.booleans()) else begin, end
    if kind == 3:
        return "aten.slice_backward.default", sized(end - begin), list(sized(whole).shape), at, begin, end, 1
    pads = [0] * (2 * (len(shape) - 1 - at)) + [draw(st.integers(-1, 2)) * unit, draw(st.integers(0, 2)) * unit]
    return "aten.constant_pad_nd.default", sized(2 * unit), pads, draw(st.sampled_from((0.0, 1.5)))


@st.composite
def gathers(draw: st.DrawFn) -> Call:
    rows, columns, places = draw(SIZES), draw(SIZES), draw(shapes(1, 2))
    kind = draw(st.integers(0, 6))
    padding = draw(st.integers(-1, rows - 1))
    if kind == 0:
        return "aten.embedding.default", t(rows, columns), T(places, "int64"), padding
    if kind == 1:
        return (
            "aten.embedding_dense_backward.default",
            T((*places, columns)),
            T(places, "int64"),
            rows,
            padding,
            draw(st.booleans()),
        )
    if kind == 2:
        return "aten.index.Tensor", t(columns, rows, 4), [None, T(places, "int64")]
    if kind == 3:
        return "aten.index_put.default", t(columns, rows, 4), [None, T(places, "int64")], T((columns, *places, 4)), True
    if kind == 4:
        return "aten.gather.default", t(columns, rows), 1, ids(columns, draw(SIZES))
    if kind == 5:
        count = draw(st.integers(1, rows))
        return "aten.scatter.src", t(columns, rows), 1, ids(columns, count), t(columns, count)
    count = draw(SIZES)
    return "aten.scatter_add.default", t(columns, rows), 1, ids(columns, count), t(columns, count)


@st.composite
def factories(draw: st.DrawFn) -> Call:
    shape = draw(shapes(0))
    kind = draw(st.integers(0, 3))
    if kind == 0:
        return "aten.full.default", list(shape), 2.0
    if kind == 1:
        return "aten.arange.start_step", draw(st.integers(-3, 3)), draw(st.integers(3, 40)), draw(st.integers(1, 3))
    return ("aten.full_like.default", T(shape), 2.0) if kind == 2 else ("aten.native_dropout.default", T(shape), 0.4, True)


@st.composite
def pooling(draw: st.DrawFn) -> Call:
    n, c = draw(SIZES), draw(SIZES)
    kind = draw(st.integers(0, 3))
    if kind == 0:
        return "aten.max_pool2d_with_indices.default", t(n, c, 6, 6), [2, 2]
    if kind == 1:
        return (
            "aten.max_pool2d_with_indices_backward.default",
            t(n, c, 3, 3),
            t(n, c, 6, 6),
            [2, 2],
            [2, 2],
            [0, 0],
            [1, 1],
            False,
            ids(n, c, 3, 3),
        )
    if kind == 2:
        return "aten.avg_pool2d.default", t(n, c, 6, 6), [2, 2]
    return "aten._adaptive_avg_pool2d.default", t(n, c, 6, 6), [2, 3]


FAMILIES: dict[str, Callable[[], st.SearchStrategy[Call]]] = {
    "contraction": contraction, "pointwise": pointwise, "reductions": reductions, "softmax": softmaxes, "losses": losses,
    "norms": norms,
    "views": views, "pieces": pieces, "gather": gathers, "factories": factories, "pooling": pooling,
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
@given(data=st.data())
def test_a_choice_is_right(family: str, data: st.DataObject) -> None:
    """Each axis splits a factor, one that another axis may split already, or has parts of a sum, or replicas."""
    target, *args = data.draw(FAMILIES[family]())
    op, values = made(target, *args)
    rule = rule_of(op, values)
    assert rule is not None
    sizes = data.draw(st.lists(st.sampled_from((2, 3, 4)), min_size=1, max_size=3).filter(lambda each: prod(each) <= 16))
    mesh, split, sums = Mesh(dict(zip("xyz", sizes, strict=False))), dict[int, tuple[str, ...]](), dict[str, int]()
    for axis in data.draw(st.permutations(mesh.names)):
        members = {
            index: mesh.axis_size(axis) * prod(map(mesh.axis_size, split.get(index, ()))) for index in range(len(rule.factors))
        }
        can = [index for index, factor in enumerate(rule.factors) if may_split(factor, members[index])]
        choice = data.draw(st.sampled_from([*can, *can, *(-1 - index for index in range(len(rule.linear))), None]))
        if choice is not None and choice >= 0:
            split[choice] = (*split.get(choice, ()), axis)
        elif choice is not None:
            sums[axis] = -1 - choice
    assert check(op, values, split, mesh, sums=sums, seed=data.draw(st.integers(0, 3))) == []
