"""The ranks that train together: the default process group, or one made under torchrun, or this process alone."""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from scrimp._warnings import warn
from scrimp.chunks import Rates, Wire
from scrimp.engine.setup.budget import Budget
from scrimp.engine.setup.meeting import meet
from scrimp.errors import MoveError, RunError
from scrimp.exchange import Dense, Sparse
from scrimp.layout import Mesh
from scrimp.move import end_group, group_timeout, own_group


def join_world(device: torch.device) -> Wire:
    if not dist.is_available():
        return Wire()
    if not dist.is_initialized() and "TORCHELASTIC_RUN_ID" in os.environ:
        meet_under_torchrun(device.type)
    if not dist.is_initialized():
        return Wire()
    if dist.get_rank() == 0 and dist.group.WORLD is not _met and _restarts_with_old_addresses():
        words = (
            "torchrun restarts failed ranks here, and keeps the store by which they find each other: a restarted rank may wait "
            "for the address of a dead one, as long as the group's time-out; leave init_process_group out, and the engine makes "
            "the group; or start torchrun with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in its environment"
        )
        warn(words)
    over_gloo = dist.get_backend() == "gloo"
    return Wire(world=dist.get_world_size(), rank=dist.get_rank(), device=torch.device("cpu") if over_gloo else device)


_met: Any = None  # the default process group, if it was made here
MEETING = timedelta(minutes=10)  # in which all ranks must have started


def meet_under_torchrun(device: str) -> None:
    """Makes the default process group of the ranks that torchrun started, in its store, below a prefix of this attempt."""
    global _met
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    try:
        master = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        store = dist.TCPStore(address, int(port), world, is_master=master, timeout=MEETING)  # type: ignore[attr-defined]
        own = dist.PrefixStore(f"scrimp/{meet(store, rank, world, MEETING)}", store)  # type: ignore[attr-defined]
        dist.init_process_group("nccl" if device == "cuda" else "gloo", store=own, rank=rank, world_size=world)
    except (RuntimeError, ValueError, OSError) as error:  # TimeoutError is an OSError
        why = str(error).partition("\n")[0]
        raise RunError(
            f"rank {rank} of {world} did not meet the others at {address}:{port}: {why}; check that this address is that of the "
            "first machine, that its port is open and free, and that all machines were started; torchrun --rdzv-endpoint "
            "HOST:PORT sets it"
        ) from error
    _met = dist.group.WORLD


def _restarts_with_old_addresses() -> bool:
    """Whether torchrun restarts ranks with the store of the attempt before: the keys of dead ranks are still in it."""
    return int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)) > 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


Group = Sequence[int] | Any | None  # as users give a training group: ranks, a process group, or None for all ranks


@dataclass(frozen=True, kw_only=True)
class TrainingGroup:
    """The ranks that train together, by their numbers in the default process group, which is `everyone`. `wire`: the same ranks;
    one rank alone where this one is not among them. `made`: the engine made the process group."""

    everyone: Wire
    members: tuple[int, ...]
    wire: Wire
    made: bool = False

    @property
    def outside(self) -> bool:
        """This rank does not train."""
        return self.everyone.rank not in self.members

    def __str__(self) -> str:
        return f"the training group is {'rank' if len(self.members) == 1 else 'ranks'} {', '.join(map(str, self.members))}"


def training_group(everyone: Wire, given: Group) -> TrainingGroup:
    """`given`, as users give a group: None for all ranks, numbers of ranks, or a process group, which ranks outside of it do not
    know. All ranks of `everyone` call it, and must give the same ranks."""
    if given is None and everyone.world == 1:
        return TrainingGroup(everyone=everyone, members=(0,), wire=everyone)
    members = _same_members(everyone, given)
    if len(members) == everyone.world:
        return TrainingGroup(everyone=everyone, members=members, wire=everyone)
    if everyone.rank not in members or len(members) == 1:
        return TrainingGroup(everyone=everyone, members=members, wire=Wire(device=everyone.device))
    made = not isinstance(given, dist.ProcessGroup)
    group = own_group(members, group_timeout(dist.group.WORLD, everyone.device)) if made else given
    wire = Wire(world=len(members), rank=members.index(everyone.rank), group=group, device=everyone.device)
    return TrainingGroup(everyone=everyone, members=members, wire=wire, made=made)


def release(group: TrainingGroup) -> None:
    """End its process group, if the engine made it."""
    if group.made:
        leave(group.wire)


def _same_members(everyone: Wire, given: Group) -> tuple[int, ...]:
    error: RunError | None = None
    members: tuple[int, ...] | None = None
    try:
        members = _members(everyone.world, given)
    except RunError as caught:  # raised once the other ranks know of it
        error = caught
    state = 2 if error is not None else int(members is not None)
    rows = everyone.every(torch.tensor([state, *(int(rank in (members or ())) for rank in range(everyone.world))])).tolist()
    if error is not None:
        raise error
    wrong = [rank for rank, row in enumerate(rows) if row[0] == 2]
    if wrong:
        raise RunError(f"rank {wrong[0]} gave a training group that is not possible; see the error there")
    said = {rank: tuple(at for at, bit in enumerate(row[1:]) if bit) for rank, row in enumerate(rows) if row[0]}
    if not said:
        raise RunError("no rank gave a training group that it is in")
    first, found = next(iter(said.items()))
    for rank, other in said.items():
        if other != found:
            raise RunError(
                f"rank {first} gave the training group {[*found]}, rank {rank} gave {[*other]}: give the same on every rank"
            )
    silent = [rank for rank in found if rank not in said]
    if silent:
        raise RunError(f"the training group is {[*found]}, and rank {silent[0]} gave a process group that it is not in")
    return found


def _members(world: int, given: Group) -> tuple[int, ...] | None:
    """None if this rank is not in the given process group, and so does not know who is."""
    if given is None:
        return tuple(range(world))
    if dist.is_available() and given == dist.GroupMember.NON_GROUP_MEMBER:
        return None
    if dist.is_available() and isinstance(given, dist.ProcessGroup):
        return tuple(dist.get_process_group_ranks(given))
    numbers = isinstance(given, Sequence) and all(isinstance(rank, int) and not isinstance(rank, bool) for rank in given)
    if not numbers or not given or len({*given}) < len(given) or not {*given} <= {*range(world)}:
        raise RunError(f"group={given!r}: give different ranks from 0 to {world - 1}, or a process group, or None for all ranks")
    return tuple(sorted(given))


def world_timeout(wire: Wire) -> timedelta | None:
    """Timeout of collectives of all ranks."""
    return group_timeout(dist.group.WORLD, wire.device)


def separate(wire: Wire) -> Wire:
    """The same ranks in a separate group, for collectives of another thread."""
    if wire.world == 1:
        return Wire()
    group = dist.new_group(timeout=group_timeout(dist.group.WORLD, wire.device))
    return Wire(world=wire.world, rank=wire.rank, group=group, device=wire.device)


def leave(wire: Wire) -> None:
    """End a group that `separate`, `along` or `own_stage` made. Its gloo threads would poll for messages a hundred times a
    second, used or not."""
    if wire.group is not None and dist.is_initialized():
        with suppress(ValueError, AssertionError):  # the user has already destroyed all groups
            end_group(wire.group)


def who_shares(wire: Wire, mesh: Mesh | None, exchange: Dense | Sparse | None) -> tuple[Wire, Wire]:
    """Without a plan: the ranks that shard model data with this one, and those of its sparse exchange, which has a separate
    group."""
    if mesh is not None and mesh.size != wire.world:
        raise RunError(f"{mesh} has {mesh.size} ranks, and {wire.world} are here")
    if not isinstance(exchange, Sparse):
        return wire, Wire()
    if exchange.axis not in (None, *(mesh.names[:1] if mesh is not None else ())):
        raise RunError(
            f"Sparse(axis={exchange.axis!r}): without a plan ranks exchange over the first axis of Engine(mesh=...); leave it out"
        )
    if mesh is None or len(mesh.axes) == 1:
        return Wire(), separate(wire)
    if len(mesh.axes) != 2:
        raise RunError(f"Sparse on {mesh}: give a mesh of one axis, or of two, nodes and their GPUs")
    return nodes(wire, mesh)


def nodes(wire: Wire, mesh: Mesh) -> tuple[Wire, Wire]:
    """For a mesh of nodes and GPUs, row by row: the ranks of this node, and those of the same position in all nodes."""
    node, gpu = mesh.names
    return along(wire, mesh, gpu), along(wire, mesh, node)


def along(wire: Wire, mesh: Mesh, axis: str) -> Wire:
    """The ranks that differ from this one along one axis of the mesh only, in a separate group."""
    found = Wire()
    if mesh.axis_size(axis) == 1:
        return found
    timeout = group_timeout(dist.group.WORLD, wire.device)
    for ranks in sorted({mesh.group(rank, (axis,)) for rank in range(mesh.size)}):  # every rank must create every group
        group = dist.new_group([*ranks], timeout=timeout)
        if wire.rank in ranks:
            found = Wire(world=len(ranks), rank=ranks.index(wire.rank), group=group, device=wire.device)
    return found


def own_stage(wire: Wire, stages: int) -> Wire:
    """The ranks of this one's pipeline stage, in a group of their own. Ranks are numbered stage by stage."""
    if stages == 1:
        return wire
    size, timeout = wire.world // stages, group_timeout(dist.group.WORLD, wire.device)
    found = Wire(device=wire.device)
    for first in range(0, wire.world, size) if size > 1 else ():  # every rank must create every group
        group = dist.new_group([*range(first, first + size)], timeout=timeout)
        if first <= wire.rank < first + size:
            found = Wire(world=size, rank=wire.rank - first, group=group, device=wire.device)
    return found


def agreed(wire: Wire, rates: Rates) -> Rates:
    """Rank 0's rates, because all ranks must plan with the same ones."""
    return Rates(**dict(zip(asdict(rates), wire.from_first(torch.tensor([*asdict(rates).values()])).tolist(), strict=True)))


def least_of_all(wire: Wire, budget: Budget) -> Budget:
    """The minimum of all ranks' budgets, because all ranks must plan alike."""
    free = 0 if budget.disk_free_nbytes is None else budget.disk_free_nbytes
    mine = torch.tensor([budget.device_nbytes, budget.plan_nbytes, budget.host_nbytes, free])
    device, plan, host, free = wire.every(mine).amin(0).tolist()
    disk_free = None if budget.disk_free_nbytes is None else free
    return replace(budget, device_nbytes=device, plan_nbytes=plan, host_nbytes=host, disk_free_nbytes=disk_free)


def ranks_here(wire: Wire) -> int:
    """Number of ranks on this host."""
    name = hashlib.blake2b(socket.gethostname().encode(), digest_size=8).digest()
    mine = torch.frombuffer(bytearray(name), dtype=torch.uint8)
    return int((wire.every(mine) == mine).all(1).sum())


def share_buffers(wire: Wire, model: nn.Module, first: int = 0) -> None:
    """Broadcast the buffers of the first rank, as DDP does before a forward."""
    if wire.world == 1:
        return
    source = first if wire.group is None else dist.get_global_rank(wire.group, first)
    for name, buffer in model.named_buffers():
        try:
            dist.broadcast(buffer, src=source, group=wire.group)
        except RuntimeError as error:
            raise MoveError(f"buffer {name} of rank {source} did not arrive: {error}") from error
