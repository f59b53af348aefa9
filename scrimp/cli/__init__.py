"""The `scrimp` command.

In:   arguments.
Out:  tables on the terminal, files, an exit code: 0 done, 1 failed, 2 wrong usage.

    _main.py        the entry point
    _app.py         the commands, their options and help
    _console.py     where commands print
    _end.py         error handling: one message, an exit code, no traceback
    _plan.py, _plan_check.py, _move.py, _clusters.py, _probe.py, _doctor.py, _diff.py, _rehearse.py    one file per command
    _explained.py, _files.py    checks of --explain and of files
    training/       `scrimp train`, `scrimp top`
    runs/           `scrimp report`, `scrimp compare`
    demo/           `scrimp demo`
    rules/          `scrimp rules`
    checkpoints/    `scrimp checkpoint`
    render/         tables, curves and pictures of layouts
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from scrimp._lazy import lazily

if TYPE_CHECKING:
    from scrimp.cli._main import main
    from scrimp.cli.demo.moves import MESH_A, MESH_B, MESH_C, MoveProblem
    from scrimp.cli.demo.train import profiled_peak

__all__ = ["MESH_A", "MESH_B", "MESH_C", "MoveProblem", "main", "profiled_peak"]

__getattr__ = lazily(
    __name__,
    {
        "main": "scrimp.cli._main",
        "MESH_A": "scrimp.cli.demo.moves",
        "MESH_B": "scrimp.cli.demo.moves",
        "MESH_C": "scrimp.cli.demo.moves",
        "MoveProblem": "scrimp.cli.demo.moves",
        "profiled_peak": "scrimp.cli.demo.train",
    },
)
