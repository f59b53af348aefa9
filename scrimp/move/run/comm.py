"""The ranks of a mesh in torch.distributed: process groups, and posting of requests.

Parts are sent point to point over the one group of the mesh, but for exchanges in which each member of a sub-group sends to all
others: these are one call of the backend on a group of these members, which saves a wake-up for each message. On NCCL gathers and
sums are calls of the backend too, because its algorithms save traffic between nodes. Gloo's go round a ring, and are slower than
point to point.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from scrimp.errors import MoveError
from scrimp.layout import Mesh
from scrimp.move.program import Program
from scrimp.move.run.execute import overload
from scrimp.move.run.holder import free
from scrimp.move.run.requests import AllReduce, AllToAll, Exchange, Gather, Part, ReduceScatter, Request
from scrimp.move.run.torch_private import (
    Posted,
    all_gather_flat,
    group_timeout,
    own_group,
    post_all_to_all,
    post_receive,
    post_send,
    reduce_scatter_flat,
)

TAGS = 1 << 29

Order = Callable[[tuple[int, ...]], tuple[int, ...]]
Finish = Callable[[], None]  # waits until a call of the backend has ended, and puts what arrived in its place

_comms: dict[tuple[int | None, tuple[int, ...]], Comm] = {}


class Comm:
    """`rank` is this process's mesh rank. `native`, if set, overrides whether gathers and sums use collectives on
    sub-groups, which otherwise they do on CUDA."""

    def __init__(self, group: Any, ranks: Sequence[int]) -> None:
        self.group = group
        self.world = dist.group.WORLD  # kept, to tell it from a later one
        self.ranks = tuple(ranks)  # global rank of each mesh rank
        self.rank = self.ranks.index(dist.get_rank())
        self.peers = tuple(dist.get_group_rank(group, rank) for rank in self.ranks)  # group rank of each mesh rank
        self.native: bool | None = None
        self.agreed: dict[str, int] = {}  # programs that the ranks have compared, and the results
        self._subgroups: dict[tuple[int, ...], Any] = {}
        self._apart: Any = None  # the group for point-to-point parts on CUDA

    def overload(self, program: Program) -> int:
        """What this process says of a program when the ranks agree: of its own rank."""
        return overload(program, self.rank)

    def every_row(self, words: list[int], device: torch.device) -> list[list[int]]:
        """The words of every rank of the group."""
        mine = torch.tensor(words, dtype=torch.int64, device=device)
        rows = [torch.empty_like(mine) for _ in self.ranks]
        dist.all_gather(rows, mine, group=self.group)
        table: list[list[int]] = torch.stack(rows).tolist()
        for each in (mine, *rows):
            free(each)  # the backend's thread may hold them longer
        return table

    def post(self, requests: Sequence[Request], tag: int = 0, *, ahead: bool = False) -> list[Finish]:
        """Posts concurrent requests, each kind and group in one call; they are served when all that it returns has been called.
        `tag` separates their messages from those of other programs and of the user. `ahead`: on CUDA the calls run on a stream
        of the backend's own, beside what is queued behind them."""
        exchanges = [request for request in requests if isinstance(request, Exchange)]
        found = [self._exchange(exchanges, TAGS + tag % TAGS)] if exchanges else []
        for kind, call in (
            (AllToAll, self._all_to_all), (Gather, self._gather), (ReduceScatter, self._reduce_scatter),
            (AllReduce, self._all_reduce),
        ):  # fmt: skip
            alike: dict[object, list[Any]] = defaultdict(list)
            for request in requests:
                if isinstance(request, kind):
                    adds = kind in (ReduceScatter, AllReduce)
                    alike[(request.members, _tensor(request).dtype if adds else None)].append(request)
            found += [call(batch, ahead) for batch in alike.values()]
        return found

    def _all_to_all(self, batch: list[AllToAll], ahead: bool) -> Finish:
        group = self._subgroup(batch[0].members, batch[0].out.device)
        sent, arriving = (
            [[size * request.out.element_size() for size in sizes] for request, sizes in each]
            for each in ([(r, r.sizes) for r in batch], [(r, r.out_sizes) for r in batch])
        )
        if len(batch) == 1:
            return post_all_to_all(raw_bytes(batch[0].out), raw_bytes(batch[0].parts), group, arriving[0], sent[0]).wait
        parts = [torch.split(raw_bytes(request.parts), sizes) for request, sizes in zip(batch, sent, strict=True)]
        local = torch.cat([piece for to_member in zip(*parts, strict=True) for piece in to_member])
        out = local.new_empty(sum(map(sum, arriving)))
        totals, out_totals = ([*map(sum, zip(*sizes, strict=True))] for sizes in (sent, arriving))
        posted = post_all_to_all(out, local, group, out_totals, totals)
        outs = [torch.split(raw_bytes(request.out), sizes) for request, sizes in zip(batch, arriving, strict=True)]

        def finish() -> None:
            posted.wait()
            _split(out, [piece for from_member in zip(*outs, strict=True) for piece in from_member])

        return finish

    def _exchange(self, requests: list[Exchange], tag: int) -> Finish:
        sends, receives = (_by_peer(parts) for parts in ([r.sends for r in requests], [r.receives for r in requests]))
        incoming = {peer: raw_bytes(pieces[0]) if len(pieces) == 1 else _raw_buffer(pieces) for peer, pieces in receives.items()}
        outgoing = {peer: raw_bytes(pieces[0]) if len(pieces) == 1 else _joined(pieces) for peer, pieces in sends.items()}
        posted = self._parts(incoming, outgoing, tag)

        def finish() -> None:
            posted.wait()
            for peer, pieces in receives.items():
                if len(pieces) > 1:
                    _split(incoming[peer], pieces)

        return finish

    def join_parts(self, device: torch.device) -> None:
        """All ranks call it before the first exchange of parts. NCCL has no tags: a group of its own separates parts from the
        user's messages. All ranks must take part in the first call on it; afterwards those with parts do."""
        if device.type == "cuda" and self._apart is None:
            timeout = group_timeout(self.group, device)
            self._apart = own_group(self.ranks, timeout)
            dist.all_reduce(torch.zeros(1, device=device), group=self._apart)

    @property
    def made(self) -> list[Any]:
        """The process groups it has made."""
        return [group for group in (*self._subgroups.values(), self._apart) if group is not None]

    def _parts(self, incoming: dict[int, torch.Tensor], outgoing: dict[int, torch.Tensor], tag: int) -> Posted:
        """Sends and receives parts. On CUDA all of them are one call; elsewhere torch's own wrapper of a message takes as long
        as a small message."""
        on_cuda = any(data.device.type == "cuda" for data in (*incoming.values(), *outgoing.values()))
        if not on_cuda:
            works = [post_receive(self.group, data, self.peers[peer], tag) for peer, data in incoming.items()]
            works += [post_send(self.group, data, self.peers[peer], tag) for peer, data in outgoing.items()]
        else:
            assert self._apart is not None, "the ranks have not joined for parts"
            ops = [dist.P2POp(dist.irecv, data, group=self._apart, peer=self.ranks[peer]) for peer, data in incoming.items()]
            ops += [dist.P2POp(dist.isend, data, group=self._apart, peer=self.ranks[peer]) for peer, data in outgoing.items()]
            works = dist.batch_isend_irecv(ops)
        return Posted(works, (*incoming.values(), *outgoing.values()))

    def _gather(self, batch: list[Gather], ahead: bool) -> Finish:
        group = self._subgroup(batch[0].members, batch[0].local.device)
        if len(batch) == 1:
            out, local = raw_bytes(batch[0].out), raw_bytes(batch[0].local)
            return _ended(all_gather_flat(out, local, group, async_op=ahead), out, local)
        local = _joined([request.local for request in batch])
        out = local.new_empty((len(batch[0].members), local.numel()))
        ended = _ended(all_gather_flat(out.view(-1), local, group, async_op=ahead), out, local)

        def finish() -> None:
            ended()
            for row, k in zip(out, range(len(out)), strict=True):
                _split(row, [request.out[k] for request in batch])

        return finish

    def _reduce_scatter(self, batch: list[ReduceScatter], ahead: bool) -> Finish:
        group = self._subgroup(batch[0].members, batch[0].out.device)
        members = len(batch[0].members)
        if len(batch) == 1:
            out, parts = _real(batch[0].out).view(-1), _real(batch[0].parts).view(-1)
            return _ended(reduce_scatter_flat(out, parts, group, async_op=ahead), out, parts)
        parts = torch.cat([_real(request.parts).reshape(members, -1) for request in batch], dim=1)
        out = parts.new_empty(parts.shape[1])
        ended = _ended(reduce_scatter_flat(out, parts.view(-1), group, async_op=ahead), out, parts)

        def finish() -> None:
            ended()
            _split(raw_bytes(out), [request.out for request in batch])

        return finish

    def _all_reduce(self, batch: list[AllReduce], ahead: bool) -> Finish:
        group = self._subgroup(batch[0].members, batch[0].total.device)
        if len(batch) == 1:
            total = _real(batch[0].total)
            return _ended(dist.all_reduce(total, group=group, async_op=ahead), total)
        total = torch.cat([_real(request.total).reshape(-1) for request in batch])
        ended = _ended(dist.all_reduce(total, group=group, async_op=ahead), total)

        def finish() -> None:
            ended()
            _split(raw_bytes(total), [request.total for request in batch])

        return finish

    def native_on(self, device: torch.device) -> bool:
        """Whether gathers and sums are collectives of the backend there."""
        return device.type == "cuda" if self.native is None else self.native

    def order(self, members: tuple[int, ...]) -> tuple[int, ...]:
        """Mesh ranks as their sub-group numbers them: torch sorts a new group by global rank."""
        whole = len(members) == len(self.ranks)
        return tuple(sorted(members, key=(self.peers if whole else self.ranks).__getitem__))

    def _subgroup(self, members: tuple[int, ...], device: torch.device) -> Any:
        if len(members) == len(self.ranks):
            return self.group
        if members not in self._subgroups:
            # The other groups of the mesh are made by their own members.
            self._subgroups[members] = own_group([self.ranks[member] for member in members], group_timeout(self.group, device))
        return self._subgroups[members]


def comm_for(mesh: Mesh, group: Any) -> Comm | None:
    """The communicator for a mesh on a group, a DeviceMesh of its shape, or the default group; None for one device. A
    communicator may be given itself."""
    if isinstance(group, Comm):
        if len(group.ranks) != mesh.size:
            raise MoveError(f"the mesh {mesh} has {mesh.size} devices, the communicator has {len(group.ranks)} ranks")
        return group if mesh.size > 1 else None
    is_mesh = hasattr(group, "mesh_dim_names")  # a DeviceMesh, recognised by attributes so that its module is not loaded
    if is_mesh:
        shape, sizes = tuple(group.mesh.shape), tuple(size for _, size in mesh.axes)
        if shape != sizes:
            raise MoveError(f"the DeviceMesh has shape {shape}, the program's mesh {mesh} has {sizes}")
        names = tuple(group.mesh_dim_names or ())
        if names != mesh.names and sorted(names) == sorted(mesh.names):
            raise MoveError(f"the DeviceMesh has the dims {names}, the program's mesh {mesh} has the axes {mesh.names}")
    if mesh.size == 1:
        if group is not None and not is_mesh and dist.get_world_size(group) > 1:
            raise MoveError(f"the mesh {mesh} has 1 device, the group has {dist.get_world_size(group)} ranks")
        return None
    if not dist.is_initialized():
        raise MoveError(
            f"the mesh {mesh} has {mesh.size} devices, but torch.distributed is not initialised: "
            "start with torchrun and call torch.distributed.init_process_group"
        )
    ranks = group.mesh.flatten().tolist() if is_mesh else dist.get_process_group_ranks(group or dist.group.WORLD)
    if len(ranks) != mesh.size:
        raise MoveError(f"the mesh {mesh} has {mesh.size} devices, the group has {len(ranks)} ranks")
    if dist.get_rank() not in ranks:
        raise MoveError(f"rank {dist.get_rank()} is not among the ranks {list(ranks)} of the mesh {mesh}")
    return _cached_comm(None if is_mesh else group, tuple(ranks))


def mesh_rank(mesh: Mesh, group: Any = None) -> int:
    """This process's rank in a mesh on a group, a DeviceMesh of its shape, or the default group; 0 for one device."""
    comm = comm_for(mesh, group)
    return 0 if comm is None else comm.rank


def _cached_comm(group: Any, ranks: tuple[int, ...]) -> Comm:
    world = dist.group.WORLD
    for stale in [key for key, comm in _comms.items() if comm.world is not world]:
        del _comms[stale]  # destroy_process_group was called since: make everything again
    key = (None if group is None else id(group), ranks)
    if key not in _comms or (group is not None and _comms[key].group is not group):
        if group is None and sorted(ranks) == list(range(dist.get_world_size())):
            group = world
        elif group is None:
            timeout = group_timeout(world, torch.device("cuda" if dist.get_backend() == "nccl" else "cpu"))
            group = own_group(ranks, timeout)
        _comms[key] = Comm(group, ranks)
    return _comms[key]


def end_group(group: Any) -> None:
    """Destroys a process group, and what moves made on it: sub-groups, and the communicator that would keep it alive."""
    for key in [key for key, comm in _comms.items() if comm.group is group]:
        for made in _comms.pop(key).made:
            dist.destroy_process_group(made)
    dist.destroy_process_group(group)


def _ended(work: Any, *tensors: torch.Tensor) -> Finish:
    """`work`: None of a call that has ended, or that CUDA's current stream runs in its turn."""
    return Posted([] if work is None else [work], tensors).wait


def _tensor(request: Any) -> torch.Tensor:
    tensor: torch.Tensor = request.total if isinstance(request, AllReduce) else request.out
    return tensor


def _by_peer(parts: list[list[Part]]) -> dict[int, list[torch.Tensor]]:
    """The pieces for each peer, in the order of the requests, which is the same at both ends."""
    found: dict[int, list[torch.Tensor]] = {}
    for part in parts:
        for peer, piece in part:
            found.setdefault(peer, []).append(piece)
    return found


def raw_bytes(piece: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor: a move without sums needs no dtype, and gloo supports few."""
    # not view(-1): a tensor of one element is contiguous with any stride, and keeps it
    return piece.as_strided((piece.numel(),), (1,)).view(torch.uint8)


def _raw_buffer(pieces: list[torch.Tensor]) -> torch.Tensor:
    return pieces[0].new_empty(sum(piece.nbytes for piece in pieces), dtype=torch.uint8)


def _joined(pieces: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([raw_bytes(piece) for piece in pieces])


def _split(raw: torch.Tensor, pieces: list[torch.Tensor]) -> None:
    """Copies concatenated bytes back into their tensors."""
    start = 0
    for piece in pieces:
        raw_bytes(piece).copy_(raw[start : start + piece.nbytes])
        start += piece.nbytes


def _real(array: torch.Tensor) -> torch.Tensor:
    """Complex numbers as pairs: backends add only real ones."""
    return torch.view_as_real(array) if array.is_complex() else array
