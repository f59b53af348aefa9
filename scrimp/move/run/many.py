"""Reshards many tensors in few calls, such as those of a whole model.

Tensors are processed in buckets of bounded bytes. Within a bucket the programs run in lockstep, so that a bucket costs as many
calls as its longest program, not as many as it has tensors. Tensors joined for one call are copied once more on either side, so a
bucket takes up to about four and a half times its bytes while it runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from scrimp.cluster import Cluster
from scrimp.errors import LayoutError
from scrimp.layout import Layout, Mesh
from scrimp.move.plan.synthesize import synthesize
from scrimp.move.program import Program
from scrimp.move.run.run import run_in_step

Item = tuple[torch.Tensor, Layout | str, Layout | str] | tuple[torch.Tensor, Layout | str, Layout | str, Sequence[int]]


def redistribute_many(
    items: Sequence[Item],
    mesh: Mesh,
    *,
    group: Any = None,
    donate: bool = False,
    cluster: Cluster | None = None,
    direct: bool = True,
    bucket_nbytes: int = 64 << 20,
) -> list[torch.Tensor]:
    """Move local tensors, each given as (tensor, source layout, target layout), to their targets.

    The global shape is taken to be the local one times the number of tiles; give it as a fourth entry where a dim does
    not divide evenly. With `donate` each input loses its storage as its bucket is run, unless it shares it with another.

    >>> import scrimp, torch
    >>> import torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> outs = scrimp.redistribute_many([(torch.ones(4, 4), "[x,-]", "[-,x]")], scrimp.Mesh({"x": 1}))
    >>> outs[0].shape
    torch.Size([4, 4])
    >>> dist.destroy_process_group()
    """
    programs = [_program(index, item, mesh, cluster, direct) for index, item in enumerate(items)]
    # A storage that several items share (tied weights) is needed until the last of them has run: it is not donated.
    storages = Counter(item[0].untyped_storage()._cdata for item in items)
    alone = [donate and storages[item[0].untyped_storage()._cdata] == 1 for item in items]
    results: list[torch.Tensor] = []
    for bucket in _buckets(programs, bucket_nbytes):
        chosen = [items[index][0] for index in bucket]
        given = [alone[index] for index in bucket]
        results += run_in_step([programs[index] for index in bucket], chosen, group=group, donate=given)
    return results


def _program(index: int, item: Item, mesh: Mesh, cluster: Cluster | None, direct: bool) -> Program:
    tensor, src, dst = item[0], Layout.parse(item[1]), Layout.parse(item[2])
    try:
        src.validate(mesh)
        if len(item) == 4:
            shape = tuple(item[3])
        elif src.rank != tensor.dim():
            raise LayoutError(f"layout {src} has {src.rank} dims, but the tensor has shape {tuple(tensor.shape)}")
        else:
            shape = tuple(size * count for size, count in zip(tensor.shape, src.counts(mesh), strict=True))
        return synthesize(shape, mesh, src, dst, dtype=tensor.dtype, cluster=cluster, direct=direct)
    except LayoutError as error:
        raise LayoutError(f"item {index}: {error}") from None


def _buckets(programs: list[Program], limit: int) -> Iterator[list[int]]:
    """Indices in order, as many together as stay under the limit, at least one."""
    bucket: list[int] = []
    filled = 0
    for index, program in enumerate(programs):
        nbytes = program.cap_numel * program.itemsize
        if bucket and filled + nbytes > limit:
            yield bucket
            bucket, filled = [], 0
        bucket.append(index)
        filled += nbytes
    if bucket:
        yield bucket
