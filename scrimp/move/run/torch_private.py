"""Names of torch that are private, or that changed between 2.11 and 2.13, each behind one function."""

from __future__ import annotations

import ctypes
import hashlib
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


def group_timeout(group: Any, device: torch.device) -> timedelta | None:
    """The time-out of a group, so that groups made from it keep it; torch has no public getter. None: the group of all ranks."""
    group = dist.group.WORLD if group is None else group
    options = getattr(group._get_backend(device), "options", None)
    timeout = getattr(options, "_timeout", None)
    return timeout if isinstance(timeout, timedelta) else None


_groups_made: Counter[tuple[int, ...]] = Counter()  # by ranks, in the world of `_groups_world`
_groups_world: Any = None


def own_group(ranks: Sequence[int], timeout: timedelta | None) -> Any:
    """A process group of some ranks, which these ranks alone make. All of them must call it.

    torch names such a group after its ranks and the number of groups that this process has. Ranks with other numbers of groups
    would wait for each other; and a later group could get the name of a destroyed one, and would find the addresses of its closed
    sockets in the store. Here the name counts the groups that these ranks have made so far."""
    global _groups_world
    if _groups_world is not dist.group.WORLD:  # destroy_process_group was called since
        _groups_made.clear()
        _groups_world = dist.group.WORLD
    members = tuple(sorted(ranks))
    _groups_made[members] += 1
    name = hashlib.sha256(f"scrimp {members} {_groups_made[members]}".encode()).hexdigest()
    names = dist.distributed_c10d
    torchs_own, names._hash_ranks_to_str = names._hash_ranks_to_str, lambda ranks: name
    try:
        return dist.new_group([*members], timeout=timeout, use_local_synchronization=True)
    finally:
        names._hash_ranks_to_str = torchs_own


def all_gather_flat(out: torch.Tensor, local: torch.Tensor, group: Any, *, async_op: bool = False) -> Any:
    """`async_op`: return at once, with a handle to wait for."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(out, local, group=group, async_op=async_op)


def reduce_scatter_flat(out: torch.Tensor, local: torch.Tensor, group: Any, *, async_op: bool = False) -> Any:
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return scatter(out, local, group=group, async_op=async_op)


def post_send(group: Any, data: torch.Tensor, peer: int, tag: int) -> Any:
    """`peer`: a rank of the group. Returns a handle to wait for."""
    return group.send([data], peer, tag)


def post_receive(group: Any, data: torch.Tensor, peer: int, tag: int) -> Any:
    return group.recv([data], peer, tag)


class Posted:
    """A call of the backend under way. It holds the memory that the call uses until the call has ended; if it does not end well,
    or nobody waits for it, for good: the backend may still write there."""

    def __init__(self, works: Sequence[Any], tensors: Sequence[torch.Tensor]) -> None:
        self._works, self._tensors = works, tuple(tensors)

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        self._works, self._tensors = (), ()

    def __del__(self) -> None:
        if self._tensors:
            _abandoned.append(self._tensors)


_abandoned: list[tuple[torch.Tensor, ...]] = []


def post_all_to_all(out: torch.Tensor, local: torch.Tensor, group: Any, out_sizes: list[int], sizes: list[int]) -> Posted:
    """`sizes`: bytes of `local` for each rank of the group, `out_sizes`: of `out` from each; both are flat bytes.

    Gloo's thread holds the tensors of its last call until it runs on, which may be long after the call has ended: memory would
    not be freed when the caller frees it. So on the CPU it gets tensors that do not own their memory."""
    even = len({*sizes, *out_sizes}) == 1
    shown = [tensor if tensor.is_cuda else _shown(tensor) for tensor in (out, local)]
    work = group.alltoall_base(*shown, [] if even else out_sizes, [] if even else sizes, dist.AllToAllOptions())
    return Posted([work], (out, local))


def _shown(tensor: torch.Tensor) -> torch.Tensor:
    """The same bytes in a tensor that does not own them."""
    if not tensor.numel():
        return tensor
    return torch.frombuffer((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()), dtype=torch.uint8)


def default_store() -> Any:
    """The key-value store by which the ranks of the default group found each other; torch has no public getter."""
    return dist.distributed_c10d._get_default_store()
