"""All parameters and buffers for an export, each once under its first name, in parts of a few million elements.

Every rank gets every part, so all ranks go through all of it. Memory does not grow with the model, nor with its largest
parameter, unless a plan splits it: then it is gathered as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from scrimp.engine.entry.checkpoints import full_values, persistent
from scrimp.engine.entry.rank_calls import begin_call

if TYPE_CHECKING:
    from scrimp.chunks import Slot
    from scrimp.engine._engine import Engine
    from scrimp.engine._training import Training

PART = 1 << 22  # elements


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """`dtype`: in which the engine computes with it. `parts`: its values in order, flat, in fp32; to be consumed before the next
    parameter is taken. `parameter`: else it is a buffer."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: Iterator[torch.Tensor]
    parameter: bool = True


def parameter_sizes(engine: Engine) -> list[tuple[str, tuple[int, ...], torch.dtype, bool]]:
    """Name, shape, dtype, and whether it is a parameter, in the order of `parameter_parts`; nothing is read."""
    run, store = engine._run, engine._run.store
    rows = []
    for index, layer in enumerate(store.table.layers):
        for slot in layer.slots:
            shape = slot.shape if store.tiling is None else store.tiling.shape(slot.name)
            rows.append((slot.name, shape, store.dtype_of(index), True))
    rows += [(name, tuple(buffer.shape), buffer.dtype, False) for name, buffer in _buffers(run)]
    return rows


def parameter_parts(engine: Engine) -> Iterator[Parameter]:
    """Collective: every rank consumes all of it."""
    run = engine._run
    begin_call(run, "iter_state")
    run.check_usable(reading=True)
    store = run.store
    for index, layer in enumerate(store.table.layers):
        with store.opened(index):
            for slot in layer.slots:
                shape = slot.shape if store.tiling is None else store.tiling.shape(slot.name)
                yield Parameter(name=slot.name, shape=shape, dtype=store.dtype_of(index), parts=_parts(run, index, slot))
    for name, buffer in _buffers(run):
        bits = buffer.view(torch.uint8) if buffer.dtype == torch.bool else buffer
        values = run.wire.from_first(bits.detach().cpu().clone()).view(buffer.dtype)
        yield Parameter(
            name=name, shape=tuple(buffer.shape), dtype=buffer.dtype, parts=iter([values.reshape(-1)]), parameter=False
        )


def _buffers(run: Training) -> Iterator[tuple[str, torch.Tensor]]:
    seen = set()
    for name, buffer in persistent(run.model).items():
        if id(buffer) not in seen:
            seen.add(id(buffer))
            yield name, buffer


def _parts(run: Training, layer: int, slot: Slot) -> Iterator[torch.Tensor]:
    store = run.store
    if store.tiling is not None:
        yield full_values(run, [(layer, slot)])[0].reshape(-1)
        return
    with store.opened(layer) as data:
        pieces = list(data.pieces(slot))
        for start in range(0, slot.numel, PART):
            stop = min(start + PART, slot.numel)
            part = torch.zeros(stop - start)
            for piece in pieces:
                first, last = max(start, piece.inside.start), min(stop, piece.inside.stop)
                if first < last:
                    source = piece.master if slot.trainable else piece.weight
                    part[first - start : last - start] = source[first - piece.inside.start : last - piece.inside.start]
            yield store.wire.sum(part)
