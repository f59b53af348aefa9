"""What `scrimp move` prints: the steps, the totals, the same for other planners, and the picture."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from textwrap import shorten
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from scrimp.cli._picture import nbytes_text, picture
from scrimp.cluster import Cluster
from scrimp.errors import LayoutError
from scrimp.ext.dtensor_plans import PeerPlan, dtensor_plan, naive_plan
from scrimp.move import Program, lower_bound_numel, synthesize

if TYPE_CHECKING:
    from rich.console import Console

WIDEST = 100
REASON_COLUMNS = 90


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One row of the comparison; `received_nbytes` is None where there is only a reason."""

    name: str
    steps: str
    received_nbytes: int | None = None
    peak_numel: int = 0


def parse_shape(text: str) -> tuple[int, ...]:
    """`"8192,8192"` -> `(8192, 8192)`; nothing is the shape of a scalar."""
    parts = [part.strip() for part in text.split(",")] if text.strip() else []
    for part in parts:
        if not (part.isascii() and part.isdigit()):
            raise LayoutError(
                f"shape '{text}': '{part}' is not a whole number of 0 or more; "
                "give one size per dim, joined by commas (example: 8192,8192)"
            )
    return tuple(map(int, parts))


def show(console: Console, program: Program, cluster: Cluster, *, peers: bool) -> None:
    count = len(program.steps)
    shape = ",".join(map(str, program.shape)) or "scalar"
    console.print(
        f"{program.src} -> {program.dst}  {program.dtype}[{shape}] on {str(program.mesh) or 'no axes'} "
        f"({program.mesh.size} device{'s' * (program.mesh.size != 1)}): {count} step{'s' * (count != 1)}",
        style="bold",
    )
    console.print(steps_table(program))
    console.print(totals_table(program))
    console.print()
    rows = contenders(program, cluster) if peers else scrimp_contenders(program, cluster)
    console.print(comparison_table(program, rows))
    if peers and program.dtype != "float32":
        console.print("DTensor's plans are those for float32, counted in this dtype")
    console.print()
    console.print(picture(program, min(console.width, WIDEST)), soft_wrap=True)


def steps_table(program: Program) -> Table:
    table = _plain_table()
    for header, justify in (
        ("#", "right"),
        ("operation", "left"),
        ("layout after", "left"),
        ("tile on rank 0", "left"),
        ("received", "right"),
        ("us", "right"),
    ):
        table.add_column(header, justify=justify)  # type: ignore[arg-type]
    table.add_row("", "source", str(program.src), _tile_text(program.src.local_shape(program.shape, program.mesh)), "", "")
    for number, step in enumerate(program.steps, start=1):
        padded = program.padded if number < len(program.steps) else program.shape
        table.add_row(
            str(number),
            step.describe(program.mesh),
            str(step.after.merge(program.mesh)),
            _tile_text(step.after.local_shape(program.shape, program.mesh, 0, padded)),
            nbytes_text(step.received_numel * program.itemsize),
            f"{step.seconds * 1e6:,.1f}",
        )
    return table


def totals_table(program: Program) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column()
    for _ in range(2):
        table.add_column(justify="right", no_wrap=True)
    table.add_column()

    def row(name: str, nbytes: int, words: str) -> None:
        table.add_row(name, nbytes_text(nbytes), f"{nbytes:,} B", words)

    peak, cap = (numel * program.itemsize for numel in (program.peak_numel, program.cap_numel))
    row("received", program.received_nbytes, "by the busiest device, over all steps")
    if not program.src.partial and not program.dst.partial:
        bound = lower_bound_numel(program.shape, program.mesh, program.src, program.dst) * program.itemsize
        row("lower bound", bound, "some device cannot do with less, whatever the program")
    row("peak", peak, f"the largest local array at any step: {_ratio(peak, cap)} the cap")
    row("cap", cap, "the larger of source and target tile")
    table.add_row("time", f"{program.seconds * 1e6:,.1f} us", f"{program.seconds:.6f} s", "by the model of the links")
    return table


def scrimp_contenders(program: Program, cluster: Cluster) -> list[Contender]:
    rows = []
    for name, direct in (("scrimp, collectives only", False), ("scrimp, with direct exchange", True)):
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
    except Exception as error:  # torch's planners raise what they like; a peer's trouble is a row, not the end
        text = shorten(" ".join(str(error).split()) or type(error).__name__, REASON_COLUMNS, placeholder=" ...")
        return Contender(name=name, steps=f"no plan: {text}")
    return Contender(
        name=name,
        steps="; ".join(" ".join(step.split()[:2]) for step in found.steps) or "nothing",
        received_nbytes=found.received_numel * itemsize,
        peak_numel=found.peak_numel,
    )


def comparison_table(program: Program, rows: list[Contender]) -> Table:
    table = _plain_table(caption="x: bytes received, over those of the program above", caption_justify="left")
    table.add_column("compared", no_wrap=True)
    table.add_column("steps")
    for header in ("received", "x", "peak / cap"):
        table.add_column(header, justify="right", no_wrap=True)
    for row in rows:
        if row.received_nbytes is None:
            table.add_row(row.name, row.steps, "-", "-", "-")
            continue
        table.add_row(
            row.name,
            row.steps,
            nbytes_text(row.received_nbytes),
            _ratio(row.received_nbytes, program.received_nbytes),
            _ratio(row.peak_numel, program.cap_numel),
        )
    return table


def _plain_table(**options: Any) -> Table:
    return Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, **options)


def _tile_text(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "scalar"


def _exact(nbytes: int) -> str:
    return nbytes_text(nbytes) if nbytes < 1024 else f"{nbytes_text(nbytes)} ({nbytes:,} B)"


def _ratio(number: float, over: float) -> str:
    if not over:
        return "-" if number else "1.00x"
    return f"{number / over:.2f}x"
