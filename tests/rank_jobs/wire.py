"""Jobs of `tests/chunks/transfer`: rank 0's values on every rank."""

from __future__ import annotations

import torch
import torch.distributed as dist

from scrimp.chunks import Wire


def values(rank: int, *, same: bool) -> list[torch.Tensor]:
    torch.manual_seed(0 if same else rank)
    shapes = [(3, 4), (), (5,), (0,), (1000, 30), (2, 2)]
    found = [torch.randn(shape) for shape in shapes]
    return [*found, torch.randn(6).bfloat16(), torch.randn(4, 6).t(), torch.arange(3) + rank * (not same)]


def each_from_first(*, same: bool, joined_nbytes: int) -> dict[str, object]:
    import scrimp.chunks.transfer.collectives as module

    before, module.JOINED_NBYTES = module.JOINED_NBYTES, joined_nbytes
    try:
        rank, sent = dist.get_rank(), [0]
        wire = Wire(dist.get_world_size(), rank)
        plain = wire.from_first

        def counted(tensor: torch.Tensor) -> torch.Tensor:
            sent[0] += 1
            return plain(tensor)

        wire.from_first = counted  # type: ignore[method-assign]
        found = list(wire.each_from_first(values(rank, same=same)))
    finally:
        module.JOINED_NBYTES = before
    wanted = values(0, same=same)
    alike = [
        one.dtype == two.dtype and one.shape == two.shape and torch.equal(one, two)
        for one, two in zip(found, wanted, strict=True)
    ]
    return {"alike": alike, "sent": sent[0]}
