"""Several weights or gradients in one move against each of them alone, on all ranks as threads."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
import torch

from scrimp.layout import Mesh
from scrimp.lower.weights.joined import gathered_together, shared_together, summed_together
from scrimp.lower.weights.rest import Rest
from scrimp.lower.weights.tiles import flat_tile, gathered, padded, shared, summed
from scrimp.planner import placed
from tests.support.lowering.threads import ThreadRank, on_threads

MESHES = ["x=4", "x=2,y=2", "x=2,y=2,z=2"]


def drawn(random: Random, mesh: Mesh) -> list[Rest]:
    """Weights whose tiles are split over other axes than those that shard them."""
    names = [*mesh.names]
    random.shuffle(names)
    cut = random.randint(1, len(names))
    axes = sorted(names[:cut], key=mesh.names.index)
    weight = tuple(axes[: random.randint(1, len(axes))])
    found = []
    for k in range(random.randint(2, 5)):
        over = tuple(axis for axis in names[cut:] if random.random() < 0.5)
        rows = 8 * random.randint(1, 3)
        use = placed([[(rows, over)], [(random.choice([1, 3, 5]), ())]])
        found.append(
            Rest(name=f"w{k}", shape=use.shape, dtype="float32", trained=True, use=use, weight=weight, gradient=weight,
                 states=tuple(axes))
        )  # fmt: skip
    return found


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("seed", range(4))
def test_gathers_together_are_gathers_alone(mesh: str, seed: int) -> None:
    found = Mesh.parse(mesh)
    of = drawn(Random(seed), found)
    wholes = [torch.randn(each.shape, generator=torch.Generator().manual_seed(seed)) for each in of]

    def job(comm: ThreadRank) -> None:
        shares = []
        for each, whole in zip(of, wholes, strict=True):
            start, stop = each.span(each.weight, found, comm.rank)
            shares.append(flat_tile(whole, each, found, comm.rank)[:, start:stop].clone())
        alone = [gathered(comm, share, each, each.weight) for share, each in zip(shares, of, strict=True)]
        before = comm.moves
        for one, other in zip(alone, gathered_together(comm, shares, of), strict=True):
            assert torch.equal(one, other)
        assert comm.moves == before + 1
        # From the shares of the states to those of the weight, as after an update by each rank.
        narrow = []
        for each, whole in zip(of, wholes, strict=True):
            start, stop = each.span(each.states, found, comm.rank)
            narrow.append(flat_tile(whole, each, found, comm.rank)[:, start:stop].clone())
        rows = shared_together(comm, narrow, of[0].states, of[0].weight)
        for share, row in zip(shares, rows, strict=True):
            assert torch.equal(share.view(-1), row.reshape(-1))

    on_threads(found, job)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("seed", range(4))
def test_sums_together_are_sums_alone(mesh: str, seed: int) -> None:
    found = Mesh.parse(mesh)
    of = drawn(Random(seed), found)
    partial = of[0].states

    def job(comm: ThreadRank) -> None:
        draw = torch.Generator().manual_seed(100 * seed + sum(comm.mesh.coordinate(comm.rank, axis) for axis in partial))
        tiles = [torch.randn(tuple(each.shape), generator=draw) for each in of]
        gradients = [
            torch.randn(flat_tile(tile, each, found, comm.rank).shape, generator=draw)[:, : each.tile_numel(found)].clone()
            for tile, each in zip(tiles, of, strict=True)
        ]
        places = [replace(each.use, partial=partial) for each in of]
        shaped = [
            gradient.view([size // _split(axes, found) for dim in each.use.dims for size, axes in dim])
            for gradient, each in zip(gradients, of, strict=True)
        ]
        alone = [
            summed(comm, gradient.clone(), place, each, each.states, donate=False)
            for gradient, place, each in zip(shaped, places, of, strict=True)
        ]
        before, flats = comm.moves, [padded(each, rest, found).clone() for each, rest in zip(shaped, of, strict=True)]
        for one, other in zip(alone, summed_together(comm, flats, ((), partial), (of[0].states, ())), strict=True):
            assert torch.equal(one.view(-1), other.reshape(-1))
        assert comm.moves == before + 1
        assert flats == []
        # In two parts: first a share that is still a partial sum along the last axes, then the rest, as at the end of a step.
        held, later = of[0].gradient, partial[len(of[0].gradient) :]
        some = summed_together(
            comm, [padded(each, rest, found).clone() for each, rest in zip(shaped, of, strict=True)], ((), partial), (held, later)
        )
        if later:
            rest = summed_together(comm, [each.clone() for each in some], (held, later), (partial, ()))
            for k, each in enumerate(of):
                assert torch.equal(
                    shared(comm, some[k].clone(), each, (held, later), (partial, ()), donate=False).view(-1), rest[k].reshape(-1)
                )

    on_threads(found, job)


def _split(axes: tuple[str, ...], mesh: Mesh) -> int:
    count = 1
    for axis in axes:
        count *= mesh.axis_size(axis)
    return count
