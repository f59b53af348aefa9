"""The commands of `scrimp rules`: their options and help. What they do is in `_rules.py`, which loads torch."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer(name="rules", rich_markup_mode="rich", pretty_exceptions_enable=False)

Operator = Annotated[str, typer.Argument(metavar="OP", help="Such as aten.addmm.default; addmm will do.")]
Shapes = Annotated[
    str | None,
    typer.Option(help="Of its tensors in order, such as 4x6,6x8 or 12x6,4x3:int64; or scalar. Looked for if not given."),
]
Settings = Annotated[list[str] | None, typer.Option("--set", help="An argument that is no tensor, such as dim=1.")]
Load = Annotated[list[str] | None, typer.Option("--load", help="A Python module that registers operators of your own.")]


@app.callback(invoke_without_command=True)
def rules(ctx: typer.Context) -> None:
    """Rules of how operators may be split: list them, check one by numbers, find one that is missing.

    An operator without a rule is kept whole by every plan: each device runs all
    of it. Without a command the operators that have rules are listed.

    Examples
      scrimp rules
      scrimp rules check aten.addmm.default --shapes 10,4x6,6x10
      scrimp rules discover aten.glu.default
    """
    if ctx.invoked_subcommand is None:
        list_()


@app.command("list")
def list_() -> None:
    """List the operators that have rules."""
    from scrimp.cli import _rules
    from scrimp.cli._app import console

    _rules.show(console())


@app.command()
def check(op: Operator, shapes: Shapes = None, settings: Settings = None, load: Load = None) -> None:
    """Check a known rule by numbers: cut the operands in every way that it allows, run each part, put together, compare.

    Exit code 1 if any of it is wrong.

    Examples
      scrimp rules check aten.mm.default
      scrimp rules check aten.embedding.default --shapes 12x6,4x3
      scrimp rules check aten._softmax.default --shapes 4x12 --set dim=1
    """
    from scrimp.cli import _rules
    from scrimp.cli._app import console

    if not _rules.check(console(), op, shapes, settings or [], load or []):
        raise typer.Exit(1)


@app.command()
def discover(op: Operator, shapes: Shapes = None, settings: Settings = None, load: Load = None) -> None:
    """Find a rule by trying: take dims of one size for one factor, cut them, run the operator on the parts, compare.

    What is found is printed as a line of the table in scrimp/rules/_known.py; for an
    operator of your own, give the line to scrimp.rules.learn before you plan. It holds
    for the literals that were tried. Exit code 1 if no dim may be split.

    Examples
      scrimp rules discover aten.addmm.default --shapes 10,4x6,6x10
      scrimp rules discover aten.glu.default --set dim=1
      scrimp rules discover aten.outer
    """
    from scrimp.cli import _rules
    from scrimp.cli._app import console

    if not _rules.find(console(), op, shapes, settings or [], load or []):
        raise typer.Exit(1)
