"""The redistribution problems that scrimp and its peers are compared on: 8 devices, float32.

`TABLE` holds 28 problems picked by hand. `default_order_pairs()` holds every ordered pair of distinct layouts that
any DTensor user can write (axes within a dim in the mesh's order) on two meshes: 72 + 240 + 702 = 1,014.
The arrays are large enough that bandwidth decides, not latency.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import permutations, product

from scrimp.cli._demo_moves import A, B, C, Problem
from scrimp.layout import Layout, Mesh

SHAPES = {2: (8192, 8192), 3: (1024, 1024, 1024)}  # by rank

PAIR_SETS = {"A rank 2": (A, 2), "A rank 3": (A, 3), "B rank 2": (B, 2)}


def default_order_layouts(mesh: Mesh, rank: int) -> tuple[Layout, ...]:
    """Every layout without partial sums whose axes stand in the mesh's order within each dim: (rank + 1) ** axes."""
    choices = product((None, *range(rank)), repeat=len(mesh.names))  # for each axis its dim, or None for replicas
    return tuple(
        Layout(dims=tuple(tuple(axis for axis, at in zip(mesh.names, choice, strict=True) if at == dim) for dim in range(rank)))
        for choice in choices
    )


def default_order_pairs(sets: Iterable[str] = tuple(PAIR_SETS)) -> tuple[Problem, ...]:
    """Every ordered pair of distinct default-order layouts of the named sets."""
    return tuple(
        Problem(f"{name}: {src} -> {dst}", mesh, SHAPES[rank], str(src), str(dst))
        for name, (mesh, rank) in ((name, PAIR_SETS[name]) for name in sets)
        for src, dst in permutations(default_order_layouts(mesh, rank), 2)
    )


TABLE = (
    Problem("A1", A, SHAPES[2], "[x,-]", "[-,x]"),
    Problem("A2", A, SHAPES[2], "[-,y]", "[y,-]"),
    Problem("A3", A, SHAPES[2], "[x,y]", "[y,x]"),
    Problem("A4", A, SHAPES[2], "[x*y,-]", "[-,x*y]"),
    Problem("A5", A, SHAPES[2], "[x,-]", "[y,-]"),
    Problem("A6", A, SHAPES[2], "[y,-]", "[x,-]"),
    Problem("A7", A, SHAPES[2], "[x*y,-]", "[y,-]"),
    Problem("A8", A, SHAPES[2], "[x*y,-]", "[x,-]"),
    Problem("A9", A, SHAPES[2], "[x,-]", "[-,y]"),
    Problem("A10", A, SHAPES[2], "[y,-]", "[-,x]"),
    Problem("A11", A, SHAPES[2], "[x*y,-]", "[x,y]"),
    Problem("A12", A, SHAPES[2], "[x*y,-]", "[y,x]"),
    Problem("A13", A, SHAPES[2], "[y,x]", "[x*y,-]"),
    Problem("A14", A, SHAPES[2], "[x*y,-]", "[y*x,-]"),
    Problem("A15", A, SHAPES[2], "[x,y]", "[y*x,-]"),
    Problem("A16", A, SHAPES[2], "[x,y]", "[-,-]"),
    Problem("B1", B, SHAPES[3], "[x,y,z]", "[y,z,x]"),
    Problem("B2", B, SHAPES[3], "[x,y,z]", "[z,y,x]"),
    Problem("B3", B, SHAPES[3], "[x*y*z,-,-]", "[-,-,x*y*z]"),
    Problem("B4", B, SHAPES[3], "[x,y,-]", "[y,x,-]"),
    Problem("B5", B, SHAPES[3], "[x*y,-,-]", "[z,-,-]"),
    Problem("B6", B, SHAPES[3], "[x*y,z,-]", "[-,x*y,z]"),
    Problem("B7", B, SHAPES[3], "[x,-,-]", "[y,-,-]"),
    Problem("B8", B, SHAPES[3], "[x,y,-]", "[-,x,y]"),
    Problem("B9", B, SHAPES[3], "[x*y,-,z]", "[z,-,x*y]"),
    Problem("B10", B, SHAPES[3], "[z,-,-]", "[x*y,-,-]"),
    Problem("B11", B, SHAPES[3], "[x*y,-,-]", "[y*x,-,-]"),
    Problem("C1", C, SHAPES[3], "[y,-,x]", "[-,x*y,-]"),
)
