"""The commands of `scrimp rules`: their options and help. `show.py`, which loads torch, does the work."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer(name="rules", rich_markup_mode="rich", pretty_exceptions_enable=False)

Operator = Annotated[str, typer.Argument(metavar="OP", help="An operator, such as aten.addmm.default, or addmm for short.")]
Shapes = Annotated[
    str | None,
    typer.Option(help="Shapes of its tensors in order, such as 4x6,6x8 or 12x6,4x3:int64 or scalar. Default: searched."),
]
Settings = Annotated[
    list[str] | None, typer.Option("--set", help="An argument that is not a tensor, such as dim=1. May be repeated.")
]
Load = Annotated[
    list[str] | None, typer.Option("--load", help="A Python module that registers your own operators. May be repeated.")
]


@app.callback(invoke_without_command=True)
def rules(ctx: typer.Context) -> None:
    """List the sharding rules of operators, check one, or find a missing one.

    If an operator has no rule, every device of a plan runs all of it. Without a
    command, scrimp rules lists the operators that have rules.

    Examples
      scrimp rules
      scrimp rules check aten.addmm.default --shapes 10,4x6,6x10
      scrimp rules discover aten.glu.default
    """
    if ctx.invoked_subcommand is None:
        list_()


@app.command("list")
def list_() -> None:
    """List the operators that have rules.

    Examples
      scrimp rules list
    """
    from scrimp.cli._console import console
    from scrimp.cli.rules import show

    show.show(console())


@app.command()
def check(op: Operator, shapes: Shapes = None, settings: Settings = None, load: Load = None) -> None:
    """Check a known rule numerically.

    It splits the operands in every way that the rule allows, runs the operator
    on each part, joins the results, and compares them with the result of the
    whole operator. Exit code 1 if any result is wrong.

    Examples
      scrimp rules check aten.mm.default
      scrimp rules check aten.embedding.default --shapes 12x6,4x3
      scrimp rules check aten._softmax.default --shapes 4x12 --set dim=1
    """
    _read(shapes, settings, load)
    from scrimp.cli._console import console
    from scrimp.cli.rules import show

    if not show.check(console(), op, shapes, settings or [], load or []):
        raise typer.Exit(1)


@app.command()
def discover(op: Operator, shapes: Shapes = None, settings: Settings = None, load: Load = None) -> None:
    """Find a rule by trial.

    It takes dims of the same size for one factor, splits them, runs the operator
    on the parts, and compares. It prints the rule as a line of the table in
    scrimp/rules/ops/registry.py. For an operator of your own, pass the line to
    scrimp.rules.learn before you plan. The rule holds for the literals that
    were tried. Exit code 1 if no dim may be split.

    Examples
      scrimp rules discover aten.addmm.default --shapes 10,4x6,6x10
      scrimp rules discover aten.glu.default --set dim=1
      scrimp rules discover aten.outer
    """
    _read(shapes, settings, load)
    from scrimp.cli._console import console
    from scrimp.cli.rules import show

    if not show.find(console(), op, shapes, settings or [], load or []):
        raise typer.Exit(1)


def _read(shapes: str | None, settings: list[str] | None, load: list[str] | None) -> None:
    """Checks the arguments before torch is loaded."""
    from scrimp.cli._end import typed
    from scrimp.cli.rules.read import check_modules, literals_of, shapes_of

    with typed():
        shapes_of(shapes)
        literals_of(settings or [])
        check_modules(load or [])
