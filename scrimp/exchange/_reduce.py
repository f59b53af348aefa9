"""Averages received packets of one parameter: subtracts their mean from a master entry by entry, or yields it piece by piece.

Ranks are added in order, so that all replicas have the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from scrimp.exchange._bucket import Bucket, Part, misplaced
from scrimp.exchange._error_feedback import feedback_pieces
from scrimp.exchange._native_select import host_selection
from scrimp.exchange._packet import unpack
from scrimp.exchange._row_topk import COLUMNS
from scrimp.exchange._select_fused import device_selection


def subtract_mean(
    master: torch.Tensor, rows: torch.Tensor, bucket: Bucket, part: Part, scale: float, weight: torch.Tensor | None = None
) -> None:
    """Subtracts the mean of the ranks' packets, times `scale`, from `master`; writes changed entries to `weight` too."""
    assert part.how is not None
    kernel, world = device_selection(master.device, bucket.dtype), rows.shape[0]
    native = host_selection() if master.is_cpu else None
    if native is not None:
        native.arrived(rows[:, part.start : part.stop], part.how, bucket.dtype, master, -scale / world, weight)
        return
    for rank in range(world):
        packet = rows[rank, part.start : part.stop]
        if kernel is not None:
            kernel.apply(packet, part.how, bucket.dtype, master, -scale / world, weight=weight)
            continue
        positions, values = unpack(packet, part.how, bucket.dtype)
        master.index_add_(0, positions, values.float(), alpha=-scale / world)
        if weight is not None:
            weight[positions] = master[positions].to(weight.dtype)


def mean_pieces(rows: torch.Tensor, bucket: Bucket, part: Part) -> Iterator[tuple[slice, torch.Tensor]]:
    """The mean in fp32, in pieces of bounded size; each is valid until the next."""
    world = rows.shape[0]
    if part.how is None:
        for span in feedback_pieces(part.numel, rows.device):
            yield span, mean_of(rows, part.start + span.start * bucket.dtype.itemsize, span.stop - span.start, bucket.dtype)
        return
    sent = [unpack(row[part.start : part.stop], part.how, bucket.dtype) for row in rows]
    for span in feedback_pieces(part.numel, rows.device):
        mean = torch.zeros(span.stop - span.start, device=rows.device)
        for positions, values in sent:
            first, last = _entries(part, span)
            mean.index_add_(0, positions[first:last] - span.start, values[first:last].float(), alpha=1 / world)
        yield span, mean


def mean_of(rows: torch.Tensor, start: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Mean over the rows of `numel` values from byte `start` on."""
    native = host_selection() if rows.is_cpu else None
    if native is not None:
        return native.mean(rows, start, numel, dtype)
    first, *others = rows[:, start : start + numel * dtype.itemsize].view(dtype)
    mean: torch.Tensor = first.to(torch.float32, copy=True).mul_(1 / len(rows))
    for values in others:
        mean.add_(values, alpha=1 / len(rows))
    return mean


def average_onto(rows: torch.Tensor, bucket: Bucket, target: Callable[[Part], torch.Tensor]) -> str | None:
    """Adds the mean to flat fp32 targets. Returns a description of what is wrong with the rows, if something is."""
    for rank, row in enumerate(rows):
        trouble = misplaced(row, bucket)
        if trouble is not None:
            return f"rank {rank} sent {trouble}"
    for part in bucket.parts:
        into = target(part)
        if part.how is not None:
            subtract_mean(into, rows, bucket, part, -1.0)
            continue
        for span, mean in mean_pieces(rows, bucket, part):
            into[span].add_(mean)
    return None


def _entries(part: Part, span: slice) -> tuple[int, int]:
    """The range of a packet's entries that belong to a span of whole rows."""
    assert part.how is not None
    first = span.start // COLUMNS * part.how.per_row
    return first, part.how.entries if span.stop == part.numel else span.stop // COLUMNS * part.how.per_row
