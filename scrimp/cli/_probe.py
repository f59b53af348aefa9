"""`scrimp probe`: prints the rates of this machine, one to a line."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from scrimp.cli._end import typed
from scrimp.cli._files import check_writable, write
from scrimp.cli.render.table import print_table
from scrimp.cluster import Cluster
from scrimp.errors import ScrimpError
from scrimp.train import cluster_of

if TYPE_CHECKING:
    from rich.console import Console


_DEVICE = re.compile(r"cpu|cuda(:[0-9]{1,3})?")


def show(
    console: Console, *, device: str | None, disk: Path | None, operators: bool, cluster: str | None, json_file: Path | None
) -> None:  # fmt: skip
    with typed():
        _check(device, disk, json_file)
        if cluster is not None and json_file is None:
            raise ScrimpError("--cluster without --json: the cluster with what was measured goes to that file; give both")
        known = None if cluster is None else cluster_of(cluster)
    measured = Cluster.probe(device, disk, operators=operators, reserve=True)
    assert measured.machine is not None
    print_table(console, ("", ""), [*measured.machine.rows()], pieces="")
    if measured.operators is not None:
        console.print()
        print_table(console, ("operators", "dtype", "rate", "error"), [*measured.operators.rows()], right=("rate", "error"))
    console.print()
    if measured.reserve is None:
        console.print("beside a plan: not measured, because this device is a CPU, which needs nothing there")
    else:
        print_table(console, ("beside a plan", "", ""), [*measured.reserve.rows()], pieces="")
    if json_file is not None:
        made = measured if known is None else _with(known, measured)
        write(json_file, made.to_json() + "\n")


def _with(known: Cluster, measured: Cluster) -> Cluster:
    """The known cluster with what was measured. Figures that were not measured now stay."""
    operators, reserve = measured.operators or known.operators, measured.reserve or known.reserve
    return replace(known, machine=measured.machine, operators=operators, reserve=reserve)


def _check(device: str | None, disk: Path | None, json_file: Path | None) -> None:
    """Runs before torch is loaded and anything is measured."""
    if device is not None and not _DEVICE.fullmatch(device):
        raise ScrimpError(
            f"--device {device}: it is neither 'cuda' nor 'cpu'; write cpu, cuda, or a GPU by its number, such as cuda:1"
        )
    if disk is not None and not disk.is_dir():
        raise ScrimpError(f"--disk {disk}: there is no such folder; give one on the disk to measure")
    if disk is not None and not os.access(disk, os.W_OK):
        raise ScrimpError(f"--disk {disk}: no permission to write there; give a writable folder")
    check_writable("--json", json_file)
