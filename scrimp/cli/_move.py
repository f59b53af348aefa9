"""`scrimp move`: prints the steps, the totals, a comparison with other planners, and the picture."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from textwrap import shorten
from typing import TYPE_CHECKING

from scrimp.cli.render.picture import nbytes_text, picture
from scrimp.cli.render.table import print_table, wrapped
from scrimp.cluster import Cluster
from scrimp.errors import LayoutError
from scrimp.ext.dtensor_plans import PeerPlan, dtensor_plan, naive_plan
from scrimp.move import Program, lower_bound_numel, synthesize

if TYPE_CHECKING:
    from rich.console import Console

WIDEST = 100
REASON_COLUMNS = 90
DIGITS = 19  # of 2 ** 63


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One row of the comparison; without a plan `received_nbytes` is None, and `steps` holds the reason."""

    name: str
    steps: str
    received_nbytes: int | None = None
    peak_numel: int = 0


def parse_shape(text: str) -> tuple[int, ...]:
    """`"8192,8192"` -> `(8192, 8192)`; nothing is the shape of a scalar."""
    parts = [part.strip() for part in text.split(",")] if text.strip() else []
    for part in parts:
        if not (part.isascii() and part.isdigit() and len(part) <= DIGITS):
            raise LayoutError(
                f"shape '{shorten(text, 60)}': '{shorten(part, 40)}' is not a whole number of 0 or more, up to {DIGITS} digits; "
                "give one size per dim, joined by commas (example: 8192,8192)"
            )
    return tuple(map(int, parts))


def show(console: Console, program: Program, cluster: Cluster, *, peers: bool) -> None:
    count = len(program.steps)
    shape = ",".join(map(str, program.shape)) or "scalar"
    title = (
        f"{program.src} -> {program.dst}  {program.dtype}[{shape}] on {str(program.mesh) or 'no axes'} "
        f"({program.mesh.size} device{'s' * (program.mesh.size != 1)}): {count} step{'s' * (count != 1)}"
    )
    for line in [title] if len(title) <= console.width else wrapped(title, console.width):
        console.print(line, style="bold", soft_wrap=True)
    console.print()
    show_steps(console, program)
    console.print()
    show_totals(console, program)
    console.print()
    rows = contenders(program, cluster) if peers else scrimp_contenders(program, cluster)
    show_comparison(console, program, rows)
    if peers and program.dtype != "float32":
        console.print("DTensor's plans are those for float32, counted in this dtype")
    console.print()
    console.print(picture(program, min(console.width, WIDEST)), soft_wrap=True)


def show_steps(console: Console, program: Program) -> None:
    headers = ("step", "layout after", "tile on rank 0", "received", "us")
    rows = [("  source", str(program.src), _tile_text(program.src.local_shape(program.shape, program.mesh)), "", "")]
    for number, step in enumerate(program.steps, start=1):
        padded = program.padded if number < len(program.steps) else program.shape
        rows.append(
            (
                f"{number} {step.describe(program.mesh)}",
                str(step.after.merge(program.mesh)),
                _tile_text(step.after.local_shape(program.shape, program.mesh, 0, padded)),
                nbytes_text(step.received_numel * program.itemsize),
                f"{step.seconds * 1e6:,.1f}",
            )
        )
    print_table(console, headers, rows, right=headers[3:])


def show_totals(console: Console, program: Program) -> None:
    rows: list[tuple[str, ...]] = []

    def row(name: str, nbytes: int, words: str) -> None:
        rows.append((name, nbytes_text(nbytes), f"{nbytes:,} B", words))

    peak, cap = (numel * program.itemsize for numel in (program.peak_numel, program.cap_numel))
    row("received", program.received_nbytes, "by the busiest device, over all steps")
    if not program.src.partial and not program.dst.partial:
        bound = lower_bound_numel(program.shape, program.mesh, program.src, program.dst) * program.itemsize
        row("lower bound", bound, "some device must receive this much in any program")
    row("peak", peak, f"the largest local array at any step: {_ratio(peak, cap)} the cap")
    row("cap", cap, "the larger of source and target tile")
    rows.append(("time", f"{program.seconds * 1e6:,.1f} us", f"{program.seconds:.6f} s", "by the cost model of the links"))
    print_table(console, ("total", "", " ", "what it is"), rows, right=("", " "), pieces="")


def scrimp_contenders(program: Program, cluster: Cluster) -> list[Contender]:
    rows = []
    for name, direct in (("scrimp, collectives only", False), ("scrimp, direct exchange", True)):
        other = synthesize(
            program.shape, program.mesh, program.src, program.dst, dtype=program.dtype, cluster=cluster, direct=direct
        )
        words = [step.describe(other.mesh).partition(",")[0] for step in other.steps]
        rows.append(
            Contender(
                name=name,
                steps="; ".join(words) or "nothing",
                received_nbytes=other.received_nbytes,
                peak_numel=other.peak_numel,
            )
        )
    return rows


def contenders(program: Program, cluster: Cluster) -> list[Contender]:
    ends = (program.shape, program.mesh, program.src, program.dst)
    return [
        *scrimp_contenders(program, cluster),
        _peer("DTensor default", lambda: dtensor_plan(*ends, min_cost=False), program.itemsize),
        _peer("DTensor min-cost", lambda: dtensor_plan(*ends, min_cost=True), program.itemsize),
        _peer("naive gather and slice", lambda: naive_plan(*ends), program.itemsize),
    ]


def _peer(name: str, plan: Callable[[], PeerPlan], itemsize: int) -> Contender:
    try:
        found = plan()
    except Exception as error:  # torch's planners can raise anything; a failing peer is a row of the table
        text = shorten(" ".join(str(error).split()) or type(error).__name__, REASON_COLUMNS, placeholder=" ...")
        return Contender(name=name, steps=f"no plan: {text}")
    return Contender(
        name=name,
        steps="; ".join(" ".join(step.split()[:2]) for step in found.steps) or "nothing",
        received_nbytes=found.received_numel * itemsize,
        peak_numel=found.peak_numel,
    )


def show_comparison(console: Console, program: Program, rows: list[Contender]) -> None:
    headers = ("compared", "received", "x", "peak / cap", "steps")
    lines = []
    for row in rows:
        figures = ["-", "-", "-"]
        if row.received_nbytes is not None:
            figures = [
                nbytes_text(row.received_nbytes),
                _ratio(row.received_nbytes, program.received_nbytes),
                _ratio(row.peak_numel, program.cap_numel),
            ]
        lines.append((row.name, *figures, row.steps))
    print_table(console, headers, lines, right=headers[1:-1], pieces=";")
    console.print("x: bytes received, over those of the program above")


def _tile_text(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "scalar"


def _ratio(number: float, over: float) -> str:
    if not over:
        return "-" if number else "1.00x"
    return f"{number / over:.2f}x"
