"""Writes docs/reference/config.md from the sections of `scrimp train`: `python -m tests.docs.config_page`."""

from __future__ import annotations

from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from scrimp.train import SECTIONS, Key, keys_of, literal

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "config.md"
HEAD = """# Configuration of a run

Every section and key that `scrimp train` reads, from `scrimp/train/config/sections.py`. `python -m tests.docs.config_page` writes
this page. [Train from a file](../howto/train.md) shows how to use them.

- A file is TOML. Only `[model] name` and one key of `[data]` for the source must be there.
- `--set section.key=value` overrides the file; a text needs no quotes.
- An unknown key, a wrong type, a value out of range, and a key without effect are errors.
- Files to read are relative to the folder of the configuration. Folders to write, and everything in `--set`, are relative to the
  current one.
- `config.toml` in the run folder has every key with its value and its origin: the file, `--set` or the default.
"""


def page() -> str:
    return "\n".join([HEAD, *(_section(name, kind) for name, kind in SECTIONS.items())])


def _section(name: str, kind: Any) -> str:
    keys = keys_of(kind)
    rows = [_row(each, keys[each.name]) for each in fields(kind)]
    head = "| Key | Value | Default | Meaning |\n|---|---|---|---|"
    return f"## [{name}]\n\n{kind.__doc__}\n\n" + "\n".join([head, *rows]) + "\n"


def _row(each: Any, key: Key) -> str:
    default = "required" if key.required else "" if each.default in (None, (), MISSING) else f"`{literal(each.default)}`"
    cells = (f"`{each.name}`", key.words, default, key.meaning)
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


if __name__ == "__main__":
    PAGE.write_text(page())
