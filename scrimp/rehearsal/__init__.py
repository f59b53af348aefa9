"""Rehearsals: one rank of a plan runs its real program here, without the other ranks.

In:   a `Plan`, its model and batch, and a rank.
Out:  a `Rehearsal`: memory over the points of a step by kind, the peak with what is alive there, and seconds.

Read in this order:

    run.py           `rehearse`, `rehearse_all`
    classes.py       ranks that take the same bytes
    communicator.py  stands for the other ranks and stages; predicted seconds of moves
    predict.py       predicted seconds of operators, copies and the update
    clock.py         what happens in a step, in order; the step time if operators and moves have a queue each
    meter.py         counts storages on meta, the CPU or a GPU
    device_memory.py what the steps take of a GPU, by the allocator's counters
    result.py        `Rehearsal`, as data, text and JSON
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from scrimp._lazy import lazily

if TYPE_CHECKING:
    from scrimp.rehearsal.clock import ComputeTime
    from scrimp.rehearsal.result import AliveTensor, DeviceMemory, Rehearsal, RehearsedPeak
    from scrimp.rehearsal.run import rehearse, rehearse_all

__all__ = ["AliveTensor", "ComputeTime", "DeviceMemory", "Rehearsal", "RehearsedPeak", "rehearse", "rehearse_all"]

__getattr__ = lazily(
    __name__,
    {
        "rehearse": "scrimp.rehearsal.run",
        "rehearse_all": "scrimp.rehearsal.run",
        "ComputeTime": "scrimp.rehearsal.clock",
        "AliveTensor": "scrimp.rehearsal.result",
        "DeviceMemory": "scrimp.rehearsal.result",
        "RehearsedPeak": "scrimp.rehearsal.result",
        "Rehearsal": "scrimp.rehearsal.result",
    },
)
