"""Sparse gradient exchange: top-k of each row, with error feedback; or dense.

In:   one parameter's gradient on every rank.
Out:  the same averaged update on every rank; what was not sent stays in the residual and is sent later.

    residual += gradient;  send top-k of residual;  residual -= sent

Read in this order:

    _settings.py            `Dense` and `Sparse`
    _row_topk.py            how many entries of a parameter travel, in rows of 65,536
    _error_feedback.py      residual and momentum of one parameter on one rank
    _residual.py            a residual in fp32, bf16 or 8 bits
    _select.py              the entries of largest magnitude; _select_fused.py and _select_kernels.py (Triton), and
                            _native_select.py (C), do the same faster
    _packet.py, _bucket.py  entries as bytes; several parameters in one message
    _bucketed_exchange.py   one step's messages, in the same order on all ranks
    _reduce.py              received packets, averaged
    _sparse_or_dense.py     which of both is faster for a parameter, by measured rates
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from scrimp._lazy import lazily

if TYPE_CHECKING:
    from scrimp.exchange._bucket import PRESENT, Bucket, Part, all_finite, plan_bucket, put_part, row_error, seal
    from scrimp.exchange._bucketed_exchange import BucketedExchange, Member, plan_buckets
    from scrimp.exchange._error_feedback import Adaptive, ErrorFeedback, Momentum, Rule, feedback_pieces, finite, largest_piece
    from scrimp.exchange._native_select import host_selection, why_no_host_selection
    from scrimp.exchange._packet import pack, unpack
    from scrimp.exchange._reduce import average_onto, mean_pieces, subtract_mean
    from scrimp.exchange._residual import RESIDUAL_KINDS, Residual, residual, residual_nbytes, residual_of, residual_tensors
    from scrimp.exchange._row_topk import RowTopK, row_topk
    from scrimp.exchange._select import select_topk, take
    from scrimp.exchange._select_fused import FusedExchange, device_selection, scratch_nbytes, why_no_device_selection
    from scrimp.exchange._settings import AUTO, RESIDUAL_PLACES, Dense, Sparse, density_at
    from scrimp.exchange._sparse_or_dense import Pace, measure_pace, sparse_pays

__all__ = [
    "AUTO", "PRESENT", "RESIDUAL_KINDS", "RESIDUAL_PLACES", "Adaptive", "Bucket", "BucketedExchange", "Dense",
    "ErrorFeedback", "FusedExchange", "Member", "Momentum", "Pace", "Part", "Residual", "RowTopK", "Rule", "Sparse", "all_finite",
    "average_onto", "density_at", "device_selection", "feedback_pieces", "finite", "host_selection", "largest_piece",
    "mean_pieces", "measure_pace", "pack", "plan_bucket", "plan_buckets", "put_part", "residual", "residual_nbytes",
    "residual_of", "residual_tensors", "row_error", "row_topk", "scratch_nbytes", "seal", "select_topk", "sparse_pays",
    "subtract_mean", "take", "unpack", "why_no_device_selection", "why_no_host_selection",
]  # fmt: skip

__getattr__ = lazily(
    __name__,
    {
        "PRESENT": "scrimp.exchange._bucket",
        "Bucket": "scrimp.exchange._bucket",
        "Part": "scrimp.exchange._bucket",
        "all_finite": "scrimp.exchange._bucket",
        "plan_bucket": "scrimp.exchange._bucket",
        "put_part": "scrimp.exchange._bucket",
        "row_error": "scrimp.exchange._bucket",
        "seal": "scrimp.exchange._bucket",
        "BucketedExchange": "scrimp.exchange._bucketed_exchange",
        "Member": "scrimp.exchange._bucketed_exchange",
        "plan_buckets": "scrimp.exchange._bucketed_exchange",
        "Adaptive": "scrimp.exchange._error_feedback",
        "ErrorFeedback": "scrimp.exchange._error_feedback",
        "Momentum": "scrimp.exchange._error_feedback",
        "Rule": "scrimp.exchange._error_feedback",
        "feedback_pieces": "scrimp.exchange._error_feedback",
        "finite": "scrimp.exchange._error_feedback",
        "largest_piece": "scrimp.exchange._error_feedback",
        "host_selection": "scrimp.exchange._native_select",
        "why_no_host_selection": "scrimp.exchange._native_select",
        "pack": "scrimp.exchange._packet",
        "unpack": "scrimp.exchange._packet",
        "average_onto": "scrimp.exchange._reduce",
        "mean_pieces": "scrimp.exchange._reduce",
        "subtract_mean": "scrimp.exchange._reduce",
        "RESIDUAL_KINDS": "scrimp.exchange._residual",
        "Residual": "scrimp.exchange._residual",
        "residual": "scrimp.exchange._residual",
        "residual_nbytes": "scrimp.exchange._residual",
        "residual_of": "scrimp.exchange._residual",
        "residual_tensors": "scrimp.exchange._residual",
        "RowTopK": "scrimp.exchange._row_topk",
        "row_topk": "scrimp.exchange._row_topk",
        "select_topk": "scrimp.exchange._select",
        "take": "scrimp.exchange._select",
        "FusedExchange": "scrimp.exchange._select_fused",
        "device_selection": "scrimp.exchange._select_fused",
        "scratch_nbytes": "scrimp.exchange._select_fused",
        "why_no_device_selection": "scrimp.exchange._select_fused",
        "AUTO": "scrimp.exchange._settings",
        "RESIDUAL_PLACES": "scrimp.exchange._settings",
        "Dense": "scrimp.exchange._settings",
        "Sparse": "scrimp.exchange._settings",
        "density_at": "scrimp.exchange._settings",
        "Pace": "scrimp.exchange._sparse_or_dense",
        "measure_pace": "scrimp.exchange._sparse_or_dense",
        "sparse_pays": "scrimp.exchange._sparse_or_dense",
    },
)
