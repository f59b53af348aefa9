"""The redistribution problems that scrimp and its peers are compared on: 8 devices, float32.

`TABLE` holds 28 problems picked by hand. `default_order_pairs()` holds every ordered pair of distinct layouts that
any DTensor user can write (axes within a dim in the mesh's order) on two meshes: 72 + 240 + 702 = 1,014.
The arrays are large enough that bandwidth decides, not latency.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import permutations, product

from scrimp.cli import MESH_A, MESH_B, MESH_C, MoveProblem
from scrimp.layout import Layout, Mesh

SHAPES = {2: (8192, 8192), 3: (1024, 1024, 1024)}  # by rank

PAIR_SETS = {"A rank 2": (MESH_A, 2), "A rank 3": (MESH_A, 3), "B rank 2": (MESH_B, 2)}


def default_order_layouts(mesh: Mesh, rank: int) -> tuple[Layout, ...]:
    """Every layout without partial sums whose axes stand in the mesh's order within each dim: (rank + 1) ** axes."""
    choices = product((None, *range(rank)), repeat=len(mesh.names))  # for each axis its dim, or None for replicas
    return tuple(
        Layout(dims=tuple(tuple(axis for axis, at in zip(mesh.names, choice, strict=True) if at == dim) for dim in range(rank)))
        for choice in choices
    )


def default_order_pairs(sets: Iterable[str] = tuple(PAIR_SETS)) -> tuple[MoveProblem, ...]:
    """Every ordered pair of distinct default-order layouts of the named sets."""
    return tuple(
        MoveProblem(f"{name}: {src} -> {dst}", mesh, SHAPES[rank], str(src), str(dst))
        for name, (mesh, rank) in ((name, PAIR_SETS[name]) for name in sets)
        for src, dst in permutations(default_order_layouts(mesh, rank), 2)
    )


TABLE = (
    MoveProblem("A1", MESH_A, SHAPES[2], "[x,-]", "[-,x]"),
    MoveProblem("A2", MESH_A, SHAPES[2], "[-,y]", "[y,-]"),
    MoveProblem("A3", MESH_A, SHAPES[2], "[x,y]", "[y,x]"),
    MoveProblem("A4", MESH_A, SHAPES[2], "[x*y,-]", "[-,x*y]"),
    MoveProblem("A5", MESH_A, SHAPES[2], "[x,-]", "[y,-]"),
    MoveProblem("A6", MESH_A, SHAPES[2], "[y,-]", "[x,-]"),
    MoveProblem("A7", MESH_A, SHAPES[2], "[x*y,-]", "[y,-]"),
    MoveProblem("A8", MESH_A, SHAPES[2], "[x*y,-]", "[x,-]"),
    MoveProblem("A9", MESH_A, SHAPES[2], "[x,-]", "[-,y]"),
    MoveProblem("A10", MESH_A, SHAPES[2], "[y,-]", "[-,x]"),
    MoveProblem("A11", MESH_A, SHAPES[2], "[x*y,-]", "[x,y]"),
    MoveProblem("A12", MESH_A, SHAPES[2], "[x*y,-]", "[y,x]"),
    MoveProblem("A13", MESH_A, SHAPES[2], "[y,x]", "[x*y,-]"),
    MoveProblem("A14", MESH_A, SHAPES[2], "[x*y,-]", "[y*x,-]"),
    MoveProblem("A15", MESH_A, SHAPES[2], "[x,y]", "[y*x,-]"),
    MoveProblem("A16", MESH_A, SHAPES[2], "[x,y]", "[-,-]"),
    MoveProblem("B1", MESH_B, SHAPES[3], "[x,y,z]", "[y,z,x]"),
    MoveProblem("B2", MESH_B, SHAPES[3], "[x,y,z]", "[z,y,x]"),
    MoveProblem("B3", MESH_B, SHAPES[3], "[x*y*z,-,-]", "[-,-,x*y*z]"),
    MoveProblem("B4", MESH_B, SHAPES[3], "[x,y,-]", "[y,x,-]"),
    MoveProblem("B5", MESH_B, SHAPES[3], "[x*y,-,-]", "[z,-,-]"),
    MoveProblem("B6", MESH_B, SHAPES[3], "[x*y,z,-]", "[-,x*y,z]"),
    MoveProblem("B7", MESH_B, SHAPES[3], "[x,-,-]", "[y,-,-]"),
    MoveProblem("B8", MESH_B, SHAPES[3], "[x,y,-]", "[-,x,y]"),
    MoveProblem("B9", MESH_B, SHAPES[3], "[x*y,-,z]", "[z,-,x*y]"),
    MoveProblem("B10", MESH_B, SHAPES[3], "[z,-,-]", "[x*y,-,-]"),
    MoveProblem("B11", MESH_B, SHAPES[3], "[x*y,-,-]", "[y*x,-,-]"),
    MoveProblem("C1", MESH_C, SHAPES[3], "[y,-,x]", "[-,x*y,-]"),
)
