"""Copies between a device and pageable host memory at the rate of the link.

CUDA copies pageable memory through a small buffer with one thread, which also touches new pages. Here two pinned staging buffers
take turns: while one crosses the link, all threads copy the other to or from its place.
"""

from __future__ import annotations

import torch

STAGE = 32 << 20  # bytes; a power of two, to which pinned memory is rounded up anyway


def carry(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copies flat tensors; synchronous."""
    if {target.device.type, source.device.type} != {"cpu", "cuda"} or source.nbytes < STAGE:
        target.copy_(source)
        return
    tile = STAGE // source.element_size()
    spans = [slice(start, start + tile) for start in range(0, source.numel(), tile)]
    if target.dtype != source.dtype or target.is_pinned() or source.is_pinned():
        for span in spans:  # cast before crossing the link, because torch would cast on the host
            target[span].copy_(source[span].to(target.dtype))
        return
    stages = [torch.empty(tile, dtype=source.dtype, pin_memory=True) for _ in range(2)]
    events = [torch.cuda.Event(), torch.cuda.Event()]  # type: ignore[no-untyped-call]
    (_down if source.is_cuda else _up)(target, source, spans, stages, events)


def _down(
    target: torch.Tensor, source: torch.Tensor, spans: list[slice], stages: list[torch.Tensor], events: list[torch.cuda.Event]
) -> None:
    def place(k: int) -> None:
        events[k % 2].synchronize()
        part = target[spans[k]]
        part.copy_(stages[k % 2][: part.numel()])

    for k, span in enumerate(spans):
        part = source[span]
        stages[k % 2][: part.numel()].copy_(part, non_blocking=True)
        events[k % 2].record()
        if k:
            place(k - 1)
    place(len(spans) - 1)


def _up(
    target: torch.Tensor, source: torch.Tensor, spans: list[slice], stages: list[torch.Tensor], events: list[torch.cuda.Event]
) -> None:
    for k, span in enumerate(spans):
        events[k % 2].synchronize()
        part = source[span]
        stage = stages[k % 2][: part.numel()]
        stage.copy_(part)
        target[span].copy_(stage, non_blocking=True)
        events[k % 2].record()
    for event in events:
        event.synchronize()
