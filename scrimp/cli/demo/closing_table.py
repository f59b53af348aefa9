"""The closing table of `scrimp demo`: budget, peaks, host memory, traffic and time of plain PyTorch and of both runs."""

from __future__ import annotations

from collections.abc import Callable

from rich.box import SIMPLE_HEAD
from rich.table import Table

from scrimp.cli.demo.train import Figures, Plain


def table(plain: Plain, first: Figures, second: Figures) -> Table:
    made = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    made.add_column("bytes on a rank", no_wrap=True)
    for header in ("plain PyTorch", "scrimp 2 ranks", "resumed 1 rank"):
        made.add_column(header, justify="right", no_wrap=True)

    def row(name: str, of_plain: str, value: Callable[[Figures], str]) -> None:
        made.add_row(name, of_plain, value(first), value(second))

    over = "over" if plain.peak_nbytes > first.budget_nbytes else "within"
    row("device budget", f"{first.budget_nbytes:,}", lambda one: f"{one.budget_nbytes:,}")
    row("peak by ledger", "", lambda one: f"{one.peak_nbytes:,}")
    row("peak by profiler, one step", f"{plain.peak_nbytes:,}", lambda one: f"{one.metered_nbytes:,}")
    row("  by ledger in that step", "", lambda one: f"{one.step_peak_nbytes:,}")
    row("  ledger / profiler", "", lambda one: f"{one.step_peak_nbytes / one.metered_nbytes:.2%}")
    row("the budget is kept", over, lambda one: "yes" if _within(one) else "NO")
    row("on the host", "", lambda one: f"{one.host_nbytes:,}")
    row("up in a step", "", lambda one: f"{one.up_nbytes:,}")
    row("  least possible", "", lambda one: f"{one.least_up_nbytes:,}")
    row("down in a step", "", lambda one: f"{one.down_nbytes:,}")
    row("  least possible", "", lambda one: f"{one.least_down_nbytes:,}")
    row("seconds a step", f"{plain.seconds:.3f}", lambda one: f"{one.seconds:.3f}")
    row("  least, estimated", "", lambda one: f"{one.least_seconds:.3f}")
    return made


def closing(seconds: float) -> str:
    return "\n".join(
        [
            "ledger     scrimp's own accounting of device memory",
            "profiler   torch's memory events, independent of the ledger",
            "least      engine.bound(), for the chosen placement and recomputation",
            "estimated  from the compute time of the first steps, with copies and updates overlapped",
            "plain      runs a rank's share of the batch",
            "",
            f"The tour took {seconds:.0f} s.",
            "",
            "Next:",
            "  scrimp demo --moves    arrays between layouts, compared with DTensor",
            '  scrimp move --mesh x=2,y=4 --shape 8192,8192 "[x,y]" "[y,x]"',
            "  make test              (in a checkout)",
        ]
    )


def _within(figures: Figures) -> bool:
    return max(figures.peak_nbytes, figures.metered_nbytes) <= figures.budget_nbytes
