"""What `scrimp probe` prints: the rates of this machine, one to a line."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from scrimp.cluster import Cluster
from scrimp.errors import ScrimpError

if TYPE_CHECKING:
    from rich.console import Console


def show(console: Console, *, device: str | None, disk: Path | None, json_file: Path | None) -> None:
    cluster = Cluster.probe(device, disk)
    assert cluster.machine is not None
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, figure in cluster.machine.rows():
        table.add_row(name, figure)
    console.print(table)
    if json_file is not None:
        try:
            json_file.write_text(cluster.to_json() + "\n")
        except OSError as error:
            raise ScrimpError(f"{json_file} cannot be written: {error.strerror}") from error
