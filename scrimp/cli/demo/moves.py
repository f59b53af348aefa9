"""`scrimp demo --moves`: arrays of 16 MiB move between layouts on 8 gloo processes, by scrimp and by PyTorch's DTensor.

Bytes and peaks are counted from the plans. Times are measured: the best of three runs between two barriers, on the
slowest rank. Every rank compares its result with its own slice of the whole array.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from scrimp.cli.render.picture import nbytes_text
from scrimp.errors import ScrimpError
from scrimp.layout import Layout, Mesh
from scrimp.move import Program, synthesize

if TYPE_CHECKING:
    import torch

REPEATS = 3
NAMES = ("scrimp", "torch")
ROOMY = 90  # columns from which the table has wider gaps; without them it fits in 80

MESH_A = Mesh({"x": 2, "y": 4})
MESH_B = Mesh({"x": 2, "y": 2, "z": 2})
MESH_C = Mesh({"x": 4, "y": 2})
SQUARE, CUBE = (2048, 2048), (128, 128, 256)  # 16 MiB of float32 each


class MoveProblem(NamedTuple):
    id: str
    mesh: Mesh
    shape: tuple[int, ...]
    src: str
    dst: str


# Named as in the benchmark, where the arrays are larger.
PROBLEMS = (
    MoveProblem("A1", MESH_A, SQUARE, "[x,-]", "[-,x]"),
    MoveProblem("A3", MESH_A, SQUARE, "[x,y]", "[y,x]"),
    MoveProblem("A4", MESH_A, SQUARE, "[x*y,-]", "[-,x*y]"),
    MoveProblem("A7", MESH_A, SQUARE, "[x*y,-]", "[y,-]"),
    MoveProblem("A10", MESH_A, SQUARE, "[y,-]", "[-,x]"),
    MoveProblem("B1", MESH_B, CUBE, "[x,y,z]", "[y,z,x]"),
    MoveProblem("B4", MESH_B, CUBE, "[x,y,-]", "[y,x,-]"),
    MoveProblem("C1", MESH_C, CUBE, "[y,-,x]", "[-,x*y,-]"),
)


@dataclass(frozen=True, kw_only=True)
class Side:
    """Cost and correctness of one of the two for a problem."""

    received_nbytes: int
    peak_over_cap: float
    seconds: float
    right: bool


def moves(console: Console, problems: Sequence[MoveProblem] = PROBLEMS) -> None:
    from scrimp.ext.ranks import RankFailure, RankPool, RankTimeout

    world = problems[0].mesh.size
    notes = Console(stderr=True, markup=False, highlight=False)
    results = []
    try:
        with notes.status(f"starting {world} processes, each of which loads torch") as status:
            if not notes.is_terminal:  # a spinner is invisible in a log
                notes.print(f"starting {world} processes; this takes some seconds")
            with RankPool(world) as ranks:
                for number, problem in enumerate(problems, start=1):
                    status.update(f"problem {number} of {len(problems)}: {problem.src} -> {problem.dst}")
                    results.append((problem, *compare(problem, ranks.run(measure, *_plain(problem)))))
    except (RankFailure, RankTimeout) as error:
        raise ScrimpError(f"the demo stopped: {error}") from error
    size = nbytes_text(max(prod(problem.shape) for problem in problems) * _program(problems[0]).itemsize)
    console.print(f"Arrays of {size} change their layout on {world} processes of this machine.", style="bold")
    console.print(results_table(results, console.width))
    console.print(closing(results, sorted({(p.id[0], str(p.mesh)) for p in problems})), soft_wrap=True)
    if not all(ours.right for _, ours, _ in results):
        raise ScrimpError("a rank of scrimp's holds wrong values: please report this with the table above")


def compare(problem: MoveProblem, measured: Sequence[tuple[bool, list[float], bool, list[float]]]) -> tuple[Side, Side]:
    """scrimp's side and DTensor's, from the plans and each rank's measurements."""
    from scrimp.ext.dtensor_plans import dtensor_plan

    program = _program(problem)
    plan = dtensor_plan(problem.shape, problem.mesh, problem.src, problem.dst, min_cost=False, path="gloo")
    sides = []
    for at, nbytes, peak in (
        (0, program.received_nbytes, program.peak_numel),
        (2, plan.received_numel * program.itemsize, plan.peak_numel),
    ):
        slowest = [max(times) for times in zip(*(rank[at + 1] for rank in measured), strict=True)]
        sides.append(
            Side(
                received_nbytes=nbytes,
                peak_over_cap=peak / program.cap_numel,
                seconds=min(slowest),
                right=all(rank[at] for rank in measured),
            )
        )
    return sides[0], sides[1]


def results_table(results: Sequence[tuple[MoveProblem, Side, Side]], width: int) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, int(width >= ROOMY), 0, 0), pad_edge=False)
    for header in ("", "from -> to"):
        table.add_column(header, no_wrap=True)
    for above, *below in (
        ("MiB in", "scrimp", "torch", "less"),
        ("peak", "scrimp", "torch"),
        ("ms", "scrimp", "torch", "faster"),
    ):
        for name in below:
            table.add_column(f"{above if name == 'scrimp' else ''}\n{name}", justify="right", no_wrap=True)
    table.add_column("\nok", no_wrap=True)
    for problem, ours, theirs in results:
        table.add_row(
            problem.id,
            f"{problem.src} -> {problem.dst}",
            *(f"{side.received_nbytes / 2**20:.2f}" for side in (ours, theirs)),
            f"{theirs.received_nbytes / ours.received_nbytes:.1f}x",
            *(f"{side.peak_over_cap:.1f}" for side in (ours, theirs)),
            *(f"{side.seconds * 1e3:.{int(side.seconds < 0.1)}f}" for side in (ours, theirs)),
            f"{theirs.seconds / ours.seconds:.1f}x",
            "✓" if ours.right and theirs.right else "✗",
        )
    return table


def closing(results: Sequence[tuple[MoveProblem, Side, Side]], meshes: Sequence[tuple[str, str]]) -> str:
    def geomean(ratio: Callable[[Side, Side], float]) -> float:
        return prod(ratio(ours, theirs) for _, ours, theirs in results) ** (1 / len(results))

    fewer = geomean(lambda ours, theirs: theirs.received_nbytes / ours.received_nbytes)
    faster = geomean(lambda ours, theirs: theirs.seconds / ours.seconds)
    over = [sum(side[at].peak_over_cap > 1 for side in results) for at in (1, 2)]  # type: ignore[union-attr]
    wrong = [
        f"{problem.id} of {name}"
        for problem, *sides in results
        for name, side in zip(NAMES, sides, strict=True)
        if not side.right
    ]
    return "\n".join(
        [
            f"Geometric means: scrimp receives {fewer:.1f}x less than torch and is {faster:.1f}x faster.",
            f"Of {len(results)} moves, {over[0]} of scrimp's and {over[1]} of torch's hold more than the larger tile.",
            *([f"Wrong values: {', '.join(wrong)}."] if wrong else []),
            "",
            "torch   DTensor.redistribute with its default planner, as it runs on gloo",
            "MiB in  received by the busiest process",
            "peak    the largest local array at any step, over the larger of source and target tile",
            "ms      best of three, on the slowest process",
            "ok      on every process the values equal its slice of the whole array",
            "meshes  " + "; ".join(f"{name} is {mesh}" for name, mesh in meshes),
            "",
            "Next:",
            '  scrimp move --mesh x=2,y=4 --shape 8192,8192 "[x,y]" "[y,x]"',
            "  make test          (in a checkout)",
            "  make bench-move    (in a checkout: every problem and planner)",
        ]
    )


def _plain(problem: MoveProblem) -> tuple[Any, ...]:
    return problem.mesh.axes, problem.shape, problem.src, problem.dst


def _program(problem: MoveProblem) -> Program:
    return synthesize(problem.shape, problem.mesh, problem.src, problem.dst)


# The following functions run on every rank.


def measure(
    axes: tuple[tuple[str, int], ...], shape: tuple[int, ...], src: str, dst: str
) -> tuple[bool, list[float], bool, list[float]]:
    """Whether scrimp's values are right and its seconds, then the same for DTensor."""
    import logging

    import torch
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor, Replicate, Shard

    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)  # every rank would log that gloo is slow
    mesh, rank = Mesh(axes), dist.get_rank()
    source, target = Layout.parse(src), Layout.parse(dst)
    full = torch.arange(prod(shape), dtype=torch.float32).view(shape)

    def tile(layout: Layout) -> torch.Tensor:
        box = layout.tile(shape, mesh, rank)
        return full[tuple(slice(start, stop) for start, stop in box)].contiguous()

    def places(layout: Layout) -> list[Any]:
        dim_of = {axis: dim for dim, names in enumerate(layout.dims) for axis in names}
        return [Shard(dim_of[axis]) if axis in dim_of else Replicate() for axis in mesh.names]

    local, want = tile(source), tile(target)
    program = synthesize(shape, mesh, source, target)
    array = DTensor.from_local(local, _device_mesh(axes), places(source), run_check=False)
    ours = _best(lambda: program.run(local), want)
    theirs = _best(lambda: array.redistribute(placements=places(target)).to_local(), want)
    return (*ours, *theirs)


def _best(move: Callable[[], torch.Tensor], want: torch.Tensor) -> tuple[bool, list[float]]:
    """Whether the first run, which also warms up, gives `want`; then the seconds of the others."""
    import time

    import torch
    import torch.distributed as dist

    right = torch.equal(move(), want)
    seconds = []
    for _ in range(REPEATS):
        dist.barrier()
        start = time.perf_counter()
        move()
        dist.barrier()
        seconds.append(time.perf_counter() - start)
    return right, seconds


_device_meshes: dict[object, Any] = {}


def _device_mesh(axes: tuple[tuple[str, int], ...]) -> Any:
    """Cached per mesh and process: making one makes process groups."""
    from torch.distributed.device_mesh import init_device_mesh

    if axes not in _device_meshes:
        sizes, names = tuple(size for _, size in axes), tuple(name for name, _ in axes)
        _device_meshes[axes] = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    return _device_meshes[axes]
