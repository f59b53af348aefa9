"""Says when a private name of torch that scrimp leans on has changed."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from scrimp.chunks.meter import profiler_private
from scrimp.ext.ranks import RankPool
from scrimp.move.run.torch_private import (
    all_gather_flat,
    default_store,
    group_timeout,
    own_group,
    post_all_to_all,
    post_receive,
    post_send,
    reduce_scatter_flat,
)


def private_names() -> str | None:
    if group_timeout(dist.group.WORLD, torch.device("cpu")) != timedelta(seconds=60):
        return f"the time-out of a group reads {group_timeout(dist.group.WORLD, torch.device('cpu'))}, not 60 s"
    world, rank = dist.get_world_size(), dist.get_rank()
    default_store().set(f"private/{rank}", "there")
    dist.barrier()
    if default_store().get(f"private/{(rank + 1) % world}") != b"there" or default_store().check(["private/none"]):
        return "the store of the default group does not keep what was set"
    out = torch.empty(world)
    all_gather_flat(out, torch.tensor([float(rank)]), dist.group.WORLD)
    if out.tolist() != [float(k) for k in range(world)]:
        return f"all_gather_flat gave {out}"
    part = torch.empty(1)
    reduce_scatter_flat(part, torch.arange(float(world)), dist.group.WORLD)
    if part.item() != world * rank:
        return f"reduce_scatter_flat gave {part}"
    sizes = [1 + (rank + other) % 2 for other in range(world)]  # as many to another rank as from it
    mine = torch.cat([torch.full((size,), 10.0 * rank + other) for other, size in enumerate(sizes)])
    wanted = torch.cat([torch.full((size,), 10.0 * other + rank) for other, size in enumerate(sizes)])
    out = torch.empty_like(wanted)
    nbytes = [4 * size for size in sizes]
    post_all_to_all(out.view(torch.uint8), mine.view(torch.uint8), dist.group.WORLD, nbytes, nbytes).wait()
    if not out.equal(wanted):
        return f"post_all_to_all gave {out}"
    got, other = torch.empty(1), rank ^ 1
    works = post_receive(dist.group.WORLD, got, other, 7), post_send(dist.group.WORLD, torch.tensor([float(rank)]), other, 7)
    for work in works:
        work.wait()
    if got.item() != other:
        return f"post_send and post_receive gave {got}"
    names = [own_group([rank, other], None).group_name for _ in range(2)]
    rows: list[Any] = [None] * world
    dist.all_gather_object(rows, names)
    if names != rows[other] or len({name for row in rows for name in row}) != world:
        return f"own_group gave groups of the names {rows}"
    return None


def shard_order_of_a_dtensor() -> object:
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    from scrimp.ext._dtensor_private import shard_order

    mesh = init_device_mesh("cpu", (2, 2))
    return shard_order(distribute_tensor(torch.ones(4, 4), mesh, [Shard(1), Shard(1)]))


def test_private_names_of_torch(ranks4: RankPool) -> None:
    assert not any(ranks4.run(private_names))


def test_the_order_of_shards_is_read(ranks4: RankPool) -> None:
    for order in ranks4.run(shard_order_of_a_dtensor):
        assert order in (None, {1: (0, 1)})


def test_the_quiet_profiler_hears_what_one_operator_allocates() -> None:
    given = torch.ones(1024, dtype=torch.bfloat16)
    assert profiler_private.AVAILABLE
    assert profiler_private.listen()
    assert not profiler_private.listen()  # it is on
    out = given + given
    del out
    assert profiler_private.heard() == [2048, -2048]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True):
        assert not profiler_private.listen()
