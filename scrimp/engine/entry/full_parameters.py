"""`engine.full_parameters`: puts fp32 master weights into the model between steps, on the host, to read and to edit.

On leaving, edits are found by comparison with the master weights, so no second copy is needed. They are written to master and
weight. After an exception nothing is written.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import nn

from scrimp.chunks import Slot
from scrimp.engine.entry.checkpoints import full_values, select
from scrimp.engine.entry.rank_calls import begin_call
from scrimp.errors import FitError, RunError
from scrimp.ledger import format_nbytes

if TYPE_CHECKING:
    from scrimp.engine._training import Training

Chosen = dict[int, tuple[int, Slot]]  # by the id of the weight: its layer and slot


@contextmanager
def full_parameters(engine: Training, patterns: tuple[str, ...]) -> Iterator[nn.Module]:
    begin_call(engine, "full_parameters")
    engine.check_usable()
    chosen = _chosen(engine, patterns)
    nbytes = sum(4 * slot.numel for _, slot in chosen.values())
    host, room = engine.ledger.host, engine.store.host_room_nbytes
    if room is not None and host.total_nbytes + nbytes > room and host.now["snapshot"]:
        engine.store.free_host()
    if room is not None and host.total_nbytes + nbytes > room:
        raise FitError(
            f"the fp32 parameters take {format_nbytes(nbytes)} on the host in addition to the "
            f"{format_nbytes(host.total_nbytes)} there, "
            f"and this rank's share of the host budget is {format_nbytes(room)}. Name fewer: engine.full_parameters('head.*'), "
            "stream them with engine.iter_state(), or use a larger Memory(host=...)"
        )
    host.charge("temporaries", nbytes)
    try:
        full = {
            key: nn.Parameter(full_values(engine, [(layer, slot)])[0], requires_grad=slot.trainable)
            for key, (layer, slot) in chosen.items()
        }
        with engine.meta_parameters.full(full):
            yield engine.model
        _check_alike(engine, chosen, full)
        _write_back(engine, chosen, full)
    finally:
        host.free("temporaries", nbytes)


def _chosen(engine: Training, patterns: tuple[str, ...]) -> Chosen:
    chosen = select(patterns, [*engine.weights]) if patterns else {*engine.weights}
    return {id(weight): engine.places[id(weight)] for name, weight in engine.weights.items() if name in chosen}


def _check_alike(engine: Training, chosen: Chosen, full: dict[int, nn.Parameter]) -> None:
    """Raises unless all ranks made the same edits."""
    if engine.wire.world == 1:
        return
    sums = torch.tensor([zlib.crc32(full[key].detach().contiguous().numpy().data) for key in chosen], dtype=torch.int64)
    differ = (engine.wire.every(sums) != sums).any(0).nonzero().flatten().tolist()
    if differ:
        names = [slot.name for _, slot in chosen.values()]
        raise RunError(
            f"engine.full_parameters(): ranks edited {names[differ[0]]} differently; nothing was written. Make the same edit on "
            "every rank"
        )


def _write_back(engine: Training, chosen: Chosen, full: dict[int, nn.Parameter]) -> None:
    by_layer: dict[int, list[tuple[Slot, torch.Tensor]]] = {}
    for key, (layer, slot) in chosen.items():
        by_layer.setdefault(layer, []).append((slot, full[key].detach()))
    for layer, rows in by_layer.items():
        with engine.store.opened(layer) as data:
            edited = [
                (slot, values)
                for slot, values in rows
                if not all(
                    _same(_mine(engine, slot, values)[piece.inside], piece.master if slot.trainable else piece.weight)
                    for piece in data.pieces(slot)
                )
            ]
        if edited:
            with engine.store.opened(layer, write=True):
                for slot, values in edited:
                    engine.store.adopt(layer, slot, values)
            engine.store.drop(layer)  # a copy on the device would have the old values


def _mine(engine: Training, slot: Slot, values: torch.Tensor) -> torch.Tensor:
    """What the slot holds of a parameter, flat."""
    tiling = engine.store.tiling
    return values.reshape(-1) if tiling is None else tiling.cut(slot.name, values)


def _same(values: torch.Tensor, there: torch.Tensor) -> bool:
    return torch.equal(values.view(torch.int32), there.float().cpu().view(torch.int32))
