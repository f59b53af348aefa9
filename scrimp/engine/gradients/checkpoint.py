"""State of a sparse exchange in checkpoints: residuals and optimizer states of every rank, by parameter.

    exchange.residual.KEY.NAME      of each rank, in its file
    exchange.state-K.NAME           optimizer states of each rank but the first, whose states are in the checkpoint proper
    exchange.position               of each rank: its number among the ranks that it exchanges with, and that of their group

A residual is one rank's share of an update that is averaged over the ranks. So when the number of ranks changes, each residual is
scaled by new ranks / old ranks, and those of missing ranks are divided among all: the sum of pending updates stays the same.
Under a plan NAME also says which part of the parameter it is of, so that residuals are not read as those of another part.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from scrimp._warnings import warn
from scrimp.checkpoint import Named
from scrimp.exchange import RESIDUAL_KINDS, Residual, residual_of, residual_tensors

if TYPE_CHECKING:
    from scrimp.engine.gradients.sparse import SparseExchange

CPU = torch.device("cpu")
PREFIX = "exchange."
POSITION = f"{PREFIX}position"


def tensors(exchange: SparseExchange, rank: int, group: int) -> Iterator[Named]:
    """Tensors that this rank writes; `rank` is its index among the ranks it exchanges with. No update may be running."""
    position = torch.tensor([rank, group])
    yield POSITION, position.dtype, (2,), position.clone
    for layer, share in exchange.with_residual():
        rest = exchange.residuals.of(share.name)
        for key, tensor in rest.tensors.items():
            yield f"{PREFIX}residual.{key}.{share.name}", tensor.dtype, tuple(tensor.shape), tensor.cpu
        if rank:
            piece = share.piece(exchange.store.direct(layer))
            for k, state in enumerate(piece.states):
                yield f"{PREFIX}state-{k}.{share.name}", state.dtype, tuple(state.shape), state.cpu


def is_sparse(files: list[Any]) -> bool:
    return any(name.startswith(f"{PREFIX}residual.") for file in files for name in file.keys())  # noqa: SIM118 - a file handle is no dict


def partners(exchange: SparseExchange, files: list[Any]) -> list[Any]:
    """The files of ranks that exchanged with each other, and have this rank's parts; if there are several such groups, because
    their ranks were replicas, the first of them. None if an old checkpoint does not say it, or no group has these parts."""
    wanted = {share.name for _, share in exchange.with_residual()}
    groups: dict[int, list[tuple[int, Any]]] = {}
    for file in files:
        if POSITION not in file.keys():  # noqa: SIM118 - a file handle is no dict
            return []
        rank, group = file.get_tensor(POSITION).tolist()
        groups.setdefault(group, []).append((rank, file))
    for _, members in sorted(groups.items()):
        found = [file for _, file in sorted(members, key=lambda member: member[0])]
        if wanted <= _parts(found[0]):
            return found
    return []


def _parts(file: Any) -> set[str]:
    """Names of the parts whose residuals a file has."""
    return {name.split(".", 3)[3] for name in file.keys() if name.startswith(f"{PREFIX}residual.")}  # noqa: SIM118


def load(exchange: SparseExchange, files: list[Any], rank: int, world: int) -> None:
    """Fill residuals and states; the store already has the first rank's moments. `files`: of the ranks with the same shards."""
    wanted = {f"{PREFIX}residual.{key}.{share.name}" for _, share in exchange.with_residual() for key in ("codes", "values")}
    present = {name for file in files[:1] for name in file.keys()}  # noqa: SIM118 - a file handle is no dict
    found = wanted & present
    left = {name for file in files[:1] for name in _parts(file)}
    left -= {share.name for _, share in exchange.with_residual()}
    if left and len(found) == sum(1 for _ in exchange.with_residual()):
        warn(f"{len(left)} parameters are now exchanged dense, such as {min(left)}: their saved residuals are dropped")
    if len(found) < sum(1 for _ in exchange.with_residual()):
        if is_sparse(files):
            warn("other ranks shared the model data when the checkpoint was saved: its residuals are dropped")
        for _, share in exchange.with_residual():
            for tensor in exchange.residuals.of(share.name).tensors.values():
                tensor.zero_()
        return
    saved = len(files)
    if saved != world:
        gone = f"; those of ranks {world} to {saved - 1} are divided among all" if saved > world else ""
        warn(f"saved by {saved} ranks and loaded by {world}: residuals are scaled by {world / saved:.3g}{gone}")
    for layer, share in exchange.with_residual():
        _load_residual(exchange.residuals.of(share.name), files, share.name, share.numel, rank, world)
        if rank % saved:
            piece = share.piece(exchange.store.direct(layer))
            for k, state in enumerate(piece.states):
                state.copy_(files[rank % saved].get_tensor(f"{PREFIX}state-{k}.{share.name}"))


def _load_residual(into: Residual, files: list[Any], name: str, numel: int, rank: int, world: int) -> None:
    saved = len(files)
    kind = _kind(files[0], name)
    found = residual_tensors(kind, numel)
    same = saved == world and {key: tensor.dtype for key, tensor in into.tensors.items()} == {k: d for k, (_, d) in found.items()}
    if same:
        for key, tensor in into.tensors.items():
            tensor.copy_(files[rank].get_tensor(f"{PREFIX}residual.{key}.{name}"))
        return
    total, span = torch.zeros(numel), slice(0, numel)
    for other in range(saved):
        share = (1.0 if other == rank else 0.0) if other < world else 1 / world
        if share:
            theirs = {key: files[other].get_tensor(f"{PREFIX}residual.{key}.{name}") for key in found}
            total.add_(residual_of(kind, theirs, CPU).read(span), alpha=share * world / saved)
    into.write(span, total.to(into.device))


def _kind(file: Any, name: str) -> str:
    keys = {*file.keys()}
    if f"{PREFIX}residual.codes.{name}" in keys:
        return "int8"
    dtype = file.get_slice(f"{PREFIX}residual.values.{name}").get_dtype()
    return {"F32": "fp32", "BF16": "bf16"}.get(dtype, RESIDUAL_KINDS[0])
