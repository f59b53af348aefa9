"""The ranks of a mesh as torch.distributed knows them, and what they must agree on before they run a program.

Parts travel point to point over the one group of the mesh: no group is made for them. Only on NCCL are groups made,
for gathers and sums, where its own algorithms save traffic between nodes; gloo's are slower than point to point.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from scrimp.errors import MoveError
from scrimp.layout import Mesh
from scrimp.move._program import Program
from scrimp.move._torch_private import group_timeout

SHAPE_SLOTS = 8

_comms: dict[object, Comm] = {}


class Comm:
    """`rank` is this process's mesh rank; `native` says that gathers and sums use collectives on sub-groups."""

    def __init__(self, group: Any, ranks: Sequence[int]) -> None:
        self.group = group
        self.ranks = tuple(ranks)  # global rank of each mesh rank
        self.rank = self.ranks.index(dist.get_rank())
        self.peers = tuple(dist.get_group_rank(group, rank) for rank in self.ranks)
        self.backend = str(dist.get_backend(group))
        self.native = "nccl" in self.backend
        self._subgroups: dict[tuple[int, ...], Any] = {}
        self._agreed: dict[str, int] = {}

    def subgroup(self, members: Iterable[int], device: torch.device) -> tuple[Any, tuple[int, ...]]:
        """The group of some mesh ranks, and the mesh ranks in the group's own order."""
        ordered = tuple(sorted(members, key=lambda member: self.ranks[member]))
        if len(ordered) == len(self.ranks):
            return self.group, tuple(sorted(ordered, key=lambda member: self.peers[member]))
        if ordered not in self._subgroups:
            self._subgroups[ordered] = dist.new_group(
                [self.ranks[member] for member in ordered],
                timeout=group_timeout(self.group, device),
                use_local_synchronization=True,  # the other groups of the mesh are made by their own members
            )
        return self._subgroups[ordered], ordered

    def exchange(self, sends: Sequence[tuple[int, torch.Tensor]], receives: Sequence[tuple[int, torch.Tensor]]) -> None:
        """Send and receive contiguous tensors, as bytes; all at once, in the order given."""
        ops = [dist.P2POp(dist.irecv, _raw(part), group=self.group, group_peer=self.peers[peer]) for peer, part in receives]
        ops += [dist.P2POp(dist.isend, _raw(part), group=self.group, group_peer=self.peers[peer]) for peer, part in sends]
        if ops:
            for work in dist.batch_isend_irecv(ops):
                work.wait()

    def agree(self, program: Program, local: torch.Tensor, fault: str | None, send_numel: int) -> int:
        """Compare program, shape and dtype over all ranks, once per program; the largest `send_numel` of any rank.

        Every rank learns of a fault on any of them, so that all raise and none is left waiting."""
        known = self._agreed.get(program.hash)
        if known is not None:
            if fault:
                raise MoveError(fault)
            return known
        shape = [*local.shape, *[-1] * SHAPE_SLOTS][:SHAPE_SLOTS]
        words = [int(program.hash[:15], 16), int(bool(fault)), send_numel, _dtype_code(local.dtype), local.dim(), *shape]
        mine = torch.tensor(words, dtype=torch.int64, device=local.device)
        rows = [torch.empty_like(mine) for _ in self.ranks]
        dist.all_gather(rows, mine, group=self.group)
        table = torch.stack(rows).tolist()
        by_mesh_rank = [table[peer] for peer in self.peers]
        if fault:
            raise MoveError(fault)
        self._compare(program, by_mesh_rank)
        most = max(int(row[2]) for row in by_mesh_rank)
        self._agreed[program.hash] = most
        return most

    def _compare(self, program: Program, rows: list[list[int]]) -> None:
        here = rows[self.rank]
        for rank, row in enumerate(rows):
            if row[0] != here[0]:
                raise MoveError(
                    f"mesh ranks {self.rank} and {rank} run different programs: hash {here[0]:015x} here, {row[0]:015x} "
                    f"there; this rank's is {program}. Call with the same shape, layouts, mesh and cluster on every rank"
                )
            if row[1]:
                dtype, dim, shape = row[3], row[4], row[5 : 5 + min(row[4], SHAPE_SLOTS)]
                expected = program.src.local_shape(program.shape, program.mesh, rank)
                raise MoveError(
                    f"mesh rank {rank} gave a tensor of shape {tuple(shape)}{'...' if dim > SHAPE_SLOTS else ''} and dtype "
                    f"{_DTYPES[dtype]} to {program}, which expects {expected} of {program.dtype} there"
                )


def comm_for(mesh: Mesh, group: Any) -> Comm | None:
    """The communicator for a mesh on a group, a DeviceMesh of its shape, or the default group; None for one device."""
    ranks: Sequence[int]
    if hasattr(group, "mesh_dim_names"):  # a DeviceMesh, known by its looks so that its module is not loaded
        shape = tuple(group.mesh.shape)
        sizes = tuple(size for _, size in mesh.axes)
        if shape != sizes:
            raise MoveError(f"the DeviceMesh has shape {shape}, the program's mesh {mesh} has {sizes}")
        ranks = group.mesh.flatten().tolist()
    elif mesh.size == 1 and (group is None or dist.get_world_size(group) == 1):
        return None
    elif not dist.is_initialized():
        raise MoveError(
            f"the mesh {mesh} has {mesh.size} devices, but torch.distributed is not initialised: "
            "start with torchrun and call torch.distributed.init_process_group"
        )
    else:
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    if mesh.size == 1:
        return None
    if len(ranks) != mesh.size:
        raise MoveError(f"the mesh {mesh} has {mesh.size} devices, the group has {len(ranks)} ranks")
    return _cached_comm(group, tuple(ranks))


def _cached_comm(group: Any, ranks: tuple[int, ...]) -> Comm:
    world = dist.group.WORLD
    if hasattr(group, "mesh_dim_names"):
        group = None
    # The default group's object is part of the key: after destroy_process_group everything is made anew.
    key = (id(world), id(group) if group is not None else None, ranks)
    if key not in _comms:
        if group is None:
            whole = sorted(ranks) == list(range(dist.get_world_size()))
            group = world if whole else dist.new_group(sorted(ranks), use_local_synchronization=True)
        for stale in [k for k in _comms if isinstance(k, tuple) and k[0] != id(world)]:
            del _comms[stale]
        _comms[key] = Comm(group, ranks)
    return _comms[key]


def _raw(part: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor: what only moves needs no dtype, and gloo knows few."""
    return part.reshape(-1).view(torch.uint8)


_DTYPES = sorted({str(d) for d in vars(torch).values() if isinstance(d, torch.dtype)})


def _dtype_code(dtype: torch.dtype) -> int:
    return _DTYPES.index(str(dtype))
