"""One rank without the others: results have the shapes that they have among all ranks, on meta and for real; what all ranks say
of a program is found alone."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from scrimp.errors import MoveError
from scrimp.layout import Mesh
from scrimp.move import LoneComm, Program, run_program, sizes_by_rank, synthesize
from scrimp.move.plan.routes import routes
from scrimp.move.run.execute import largest_overload, overload

MESHES = ("x=8", "x=2,y=4", "x=2,y=2,z=2", "x=3,y=2")


def programs(mesh: Mesh, count: int) -> Iterator[Program]:
    """Between random layouts, some with partial sums, of even and of uneven shapes."""
    draw = random.Random(str(mesh))
    for _ in range(count):
        shape = (draw.choice([5, 8, 24]), 12, draw.choice([7, 16]))
        summed = [axis for axis in mesh.names if draw.random() < 0.2]
        ends = []
        for _ in range(2):
            dims: list[list[str]] = [[], [], [], []]
            for axis in draw.sample(mesh.names, len(mesh.names)):
                if axis not in summed:
                    draw.choice(dims).append(axis)
            ends.append("[" + ",".join("*".join(dim) or "-" for dim in dims[:3]) + "]")
        yield synthesize(shape, mesh, ends[0] + "".join(f"+{axis}" for axis in summed), ends[1])


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_results_have_their_shapes(mesh: str, native: bool, device: str) -> None:
    on = Mesh.parse(mesh)
    for program in programs(on, 25):
        for rank in range(on.size):
            local = torch.ones(program.src.local_shape(program.shape, on, rank), device=device)
            found = run_program(program, local, group=LoneComm(on, rank, native=native), met=native)
            assert tuple(found.shape) == program.dst.local_shape(program.shape, on, rank)
            assert found.device.type == device
            assert device == "meta" or bool(torch.isfinite(found).all())


def test_indices_stay_valid() -> None:
    mesh = Mesh.parse("x=4")
    program = synthesize((8, 4), mesh, "[x,-]", "[-,-]", dtype="int64")
    local = torch.randint(0, 50, (2, 4))
    found = run_program(program, local, group=LoneComm(mesh, 2, native=False))
    assert {*found.flatten().tolist()} <= {*local.flatten().tolist()}


@pytest.mark.parametrize("mesh", MESHES)
def test_the_largest_overload_is_that_of_all_ranks(mesh: str) -> None:
    on, seen = Mesh.parse(mesh), 0
    for program in programs(on, 60):
        seen += any(step.kind in ("exchange", "direct") for step in program.steps)
        assert largest_overload(program) == max(overload(program, rank) for rank in range(on.size))
    assert seen


@pytest.mark.parametrize("mesh", MESHES)
def test_ranks_of_equal_sizes_have_routes_of_equal_shapes(mesh: str) -> None:
    on = Mesh.parse(mesh)
    for program in programs(on, 40):
        alike: dict[object, object] = {}
        for rank, sizes in enumerate(sizes_by_rank(program)):
            parts = [routes(program, step, rank) for step in program.steps if step.kind != "all_reduce"]
            shapes = [[sorted(_shape(box) for _, box in side) for side in (part.sends, part.receives)] for part in parts]
            assert alike.setdefault(sizes, shapes) == shapes, f"{program}, rank {rank}"


def test_a_communicator_of_another_mesh_is_refused() -> None:
    program = synthesize((8,), Mesh.parse("x=4"), "[x]", "[-]")
    with pytest.raises(MoveError, match="the communicator has 2 ranks"):
        run_program(program, torch.zeros(2), group=LoneComm(Mesh.parse("x=2"), 0, native=False))


def _shape(box: tuple[tuple[int, int], ...]) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)
