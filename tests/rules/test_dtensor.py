"""Rules against DTensor's: where it runs a choice of ours without moving anything, its outputs are placed as ours are."""

from __future__ import annotations

import pytest
import torch

from scrimp.ext.ranks import RankPool, pool
from scrimp.layout import Mesh
from scrimp.rules import check, choices, layouts, rule_of
from tests.rank_jobs import rules as rule_jobs
from tests.support.rule_examples import EXAMPLES, FLOAT, ids, made, t

TWO = Mesh({"x": 2})
SAMPLE = (
    ("aten.mm.default", t(4, 6), t(6, 12)),
    ("aten.addmm.default", t(12), t(4, 6), t(6, 12)),
    ("aten.bmm.default", t(4, 6, 8), t(4, 8, 2)),
    ("aten.native_layer_norm.default", t(4, 6, 8), [8], t(8), t(8), 1e-5),
    ("aten.native_layer_norm_backward.default", *[t(4, 6, 8)] * 2, [8], *[t(4, 6, 1)] * 2, t(8), t(8), [True] * 3),
    ("aten._softmax.default", t(4, 6, 8), -1, False),
    ("aten._softmax_backward_data.default", t(4, 6), t(4, 6), 1, FLOAT),
    ("aten.embedding.default", t(12, 6), ids(4, 2)),
    ("aten.add.Tensor", t(4, 6), t(6)),
    ("aten.mul.Tensor", t(4, 6), t(4, 1)),
    ("aten.sum.dim_IntList", t(4, 6, 8), [0, 2]),
    ("aten.sum.dim_IntList", t(4, 6), [1], True),
    ("aten.view.default", t(4, 6, 8), [24, 2, 4]),
    ("aten.view.default", t(24, 8), [4, 6, 8]),
    ("aten.transpose.int", t(4, 6, 8), 0, 2),
    ("aten.gelu_backward.default", t(4, 6), t(4, 6)),
    ("aten.cat.default", [t(4, 6), t(4, 2)], 1),
)
# Of these DTensor does not run all choices as they are: it moves something first, or cannot say them. `check` proves them.
OURS = {
    "aten.view.default",  # a minor factor
    "aten.cat.default",  # inside of the pieces
    "aten._softmax.default",  # the dim that is normalised
    "aten._softmax_backward_data.default",
    *("aten.native_layer_norm_backward.default", "aten.gelu_backward.default", "aten.embedding.default"),  # parts of a sum pass
    *(("aten.mul.Tensor",) if torch.__version__ < "2.13" else ()),  # there too, in older versions
}


@pytest.fixture(scope="module")
def ranks2() -> RankPool:
    return pool(2)


def test_where_dtensor_moves_nothing_it_agrees(ranks2: RankPool) -> None:
    asked, ours, alone = [], [], set[str]()
    for call in SAMPLE:
        op, values = made(*call)
        rule = rule_of(op, values)
        assert rule is not None
        ways = [({factor: ("x",)}, {}) for factor in choices(rule, TWO, "x")] + [
            ({}, {"x": index}) for index in range(len(rule.linear))
        ]
        for split, sums in ways:
            inputs, outputs = layouts(rule, split, sums)
            assert check(op, values, split, TWO, sums=sums) == []
            if None in [rule_jobs.placement(each) for each in (*inputs, *filter(None, outputs))]:
                alone.add(op.target)
                continue
            asked.append((op, tuple((values[name].shape, values[name].dtype) for name in op.inputs), inputs))
            ours.append([rule_jobs.name(rule_jobs.placement(each)) for each in outputs if each is not None])
    theirs = ranks2.run(rule_jobs.propagated, asked)[0]
    agreed = 0
    for (op, _, inputs), mine, other in zip(asked, ours, theirs, strict=True):
        if other is None:
            alone.add(op.target)
        else:
            assert mine == other, (op.target, [str(each) for each in inputs])
            agreed += 1
    assert alone <= OURS
    assert agreed >= 50


# Where DTensor moves nothing and says otherwise; `check` proves ours in other tests.
OTHERWISE = {
    # Members talk inside, and it is complete: theirs are parts, of a largest or of a mean.
    *(f"aten.{name}.default" for name in ("amax", "amin", "any", "all", "nll_loss_forward", "nll_loss2d_forward")),
    *("aten.any.dim", "aten.all.dim", "aten.any.dims", "aten.all.dims"),
    # A new dim that each makes a part of: theirs is whole.
    *(f"aten.{name}.default" for name in ("expand", "repeat", "embedding_dense_backward")),
    *(f"aten.{name}.default" for name in ("new_empty", "new_full", "new_ones", "new_zeros")),
    # Statistics of what is not training, which are empty.
    *("aten._native_batch_norm_legit_functional.default", "aten._native_batch_norm_legit_no_training.default"),
    "aten.native_batch_norm.default",
    # Theirs calls whatever is not split by the batch a replica.
    "aten.convolution.default",
}
CHUNK = 100


def test_on_all_examples_it_agrees_or_it_is_known_why_not(ranks2: RankPool) -> None:
    asked, ours = [], []
    for target, args, kwargs in EXAMPLES:
        op, values = made(target, *args, **kwargs)
        rule = rule_of(op, values)
        assert rule is not None
        ways = [({factor: ("x",)}, {}) for factor in choices(rule, TWO, "x")] + [
            ({}, {"x": index}) for index in range(len(rule.linear))
        ]
        for split, sums in ways:
            inputs, outputs = layouts(rule, split, sums)
            if None not in [rule_jobs.placement(each) for each in (*inputs, *filter(None, outputs))]:
                asked.append((op, tuple((values[name].shape, values[name].dtype) for name in op.inputs), inputs))
                ours.append(["" if each is None else rule_jobs.name(rule_jobs.placement(each)) for each in outputs])
    chunks = [asked[start : start + CHUNK] for start in range(0, len(asked), CHUNK)]
    theirs = [each for chunk in chunks for each in ranks2.run(rule_jobs.propagated, chunk)[0]]
    same = [op.target for (op, _, _), mine, other in zip(asked, ours, theirs, strict=True) if mine == other]
    differ = {op.target for (op, _, _), mine, other in zip(asked, ours, theirs, strict=True) if other not in (None, mine)}
    assert differ <= OTHERWISE
    assert len(same) >= 400
    assert len({*same}) >= 140  # DTensor of torch 2.11 knows a few operators less than that of 2.13
