"""Messages between the stages of a pipeline on gloo ranks, by tags and over channels."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from scrimp.errors import RunError
from scrimp.ext.ranks import pool
from scrimp.move import Channel, ChannelPeers, Peers, received_nbytes

SPREAD = [torch.tensor(3.5), torch.arange(5), torch.tensor([True, False]), torch.full((2, 3), 0.5).bfloat16()]
CHANNELS = (
    Channel(sender=0, receiver=1, tags=(2, 6), pairs=((0, 0), (0, 1), (1, 1))),
    Channel(sender=1, receiver=0, tags=(1,), pairs=((0, 0), (1, 1))),
)


def peers_of(kind: str) -> Peers:
    return Peers(2) if kind == "tags" else ChannelPeers(2, CHANNELS, torch.device("cpu"))


def messages(kind: str) -> tuple[list[list[float]], int]:
    """Two stages of two ranks. The first stage sends three tensors of different sizes, and both ways are open at once."""
    peers, (stage, rank) = peers_of(kind), divmod(dist.get_rank(), 2)
    before, found = received_nbytes(), []
    for _ in range(2):
        peers.join()
        if stage == 0:
            back = torch.zeros(2)
            handles = [peers.receive([(rank, back)], 1, 1)]
            for size, tag in ((3, 2), (5, 6), (4, 2)):
                to = [(other, torch.full((size,), 10.0 * size + rank)) for other in range(rank, 2)]
                handles.append(peers.send(to, 1, tag))
            for handle in handles:
                handle.wait()
            found.append(back.tolist())
            continue
        sent = peers.send([(rank, torch.full((2,), 1.0 + rank))], 0, 1)
        for size, tag in ((3, 2), (5, 6), (4, 2)):
            parts = [(other, torch.zeros(size)) for other in range(rank + 1)]
            peers.receive(parts, 0, tag).wait()
            found += [part.tolist() for _, part in parts]
        sent.wait()
    peers.close()
    return found, received_nbytes() - before


@pytest.mark.parametrize("kind", ["tags", "channels"])
def test_tensors_arrive_in_order(kind: str) -> None:
    ran = pool(4).run(messages, kind)
    for rank in (0, 1):
        assert ran[rank] == ([[1.0 + rank] * 2] * 2, 16)
    assert ran[2] == ([[10.0 * size] * size for size in (3, 5, 4)] * 2, 2 * 4 * 12)
    assert ran[3] == ([[10.0 * size + sender] * size for size in (3, 5, 4) for sender in (0, 1)] * 2, 2 * 2 * 4 * 12)


def spread(kind: str) -> list[torch.Tensor]:
    peers, given = peers_of(kind), [each.clone() if dist.get_rank() == 2 else torch.zeros_like(each) for each in SPREAD]
    for each in given:
        peers.spread(each, 1)
    return given


@pytest.mark.parametrize("kind", ["tags", "channels"])
def test_the_first_rank_of_a_stage_gives_every_rank_its_tensor(kind: str) -> None:
    for found in pool(4).run(spread, kind):
        assert all(torch.equal(each, wanted) for each, wanted in zip(found, SPREAD, strict=True))


def test_a_tensor_off_the_cpu_is_refused_over_gloo() -> None:
    with pytest.raises(RunError, match=r"a pipeline stage sends a tensor on meta over gloo.*init_process_group\('nccl'\)"):
        Peers(1).send([(0, torch.empty(2, device="meta"))], 1, 0)
