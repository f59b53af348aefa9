"""Writes docs/reference/commands.md from the commands' own help: `python -m tests.docs.commands_page`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from scrimp.cli._app import app

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "commands.md"
HEAD = """# Command line

This page is the text of `--help`. `python -m tests.docs.commands_page` writes it.
"""


def page() -> str:
    root = typer.main.get_command(app)
    return "\n".join([HEAD, f"{_text(root)}\n", f"{_table(root)}\n", *_sections(root, "scrimp")])


def _sections(group: Any, prefix: str) -> Iterator[str]:
    for name, command in group.commands.items():
        yield f"## {prefix} {name}\n\n{_text(command)}\n"
        table = _table(command)
        if table:
            yield f"{table}\n"
        if hasattr(command, "commands"):
            yield from _sections(command, f"{prefix} {name}")


def _text(command: Any) -> str:
    """Paragraphs on one line each, examples as code."""
    head, _, examples = inspect.cleandoc(command.help or "").replace("\\[", "[").partition("Examples\n")
    text = "\n\n".join(_line(paragraph) for paragraph in head.strip().split("\n\n"))
    return f"{text}\n\n```\n{inspect.cleandoc(examples)}\n```" if examples.strip() else text


def _table(command: Any) -> str:
    rows = [_row(each) for each in command.params if each.name != "help" and not getattr(each, "hidden", False)]
    return "\n".join(["| Argument or option | Default | Meaning |", "|---|---|---|", *rows]) if rows else ""


def _row(parameter: Any) -> str:
    is_option = parameter.param_type_name == "option"
    name = ", ".join(parameter.opts) if is_option else parameter.metavar or parameter.name.upper()
    default = parameter.default if isinstance(parameter.default, (str, int, float)) else None
    shown = "required" if parameter.required else "" if default is None or default is False else f"`{default}`"
    cells = (f"`{name}`", shown, _line(parameter.help or ""))
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _line(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip().replace("\\[", "[")


if __name__ == "__main__":
    PAGE.write_text(page())
