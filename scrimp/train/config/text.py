"""Writes a configuration as TOML: each key with its value and the origin of the value. `read.py` reads it again."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from scrimp.train.config.keys import keys_of
from scrimp.train.config.resolved import Resolved
from scrimp.train.config.sections import SECTIONS

WIDTH = 44  # of a key and its value, before the origin


def to_toml(resolved: Resolved) -> str:
    """Keys that are not set are comments."""
    return "\n".join(_lines(resolved)) + "\n"


def _lines(resolved: Resolved) -> Iterator[str]:
    for number, name in enumerate(SECTIONS):
        section = getattr(resolved.config, name)
        if number:
            yield ""
        yield f"[{name}]"
        for key, about in keys_of(section).items():
            value, path = getattr(section, key), f"{name}.{key}"
            if isinstance(value, Mapping):
                for inner, each in value.items():
                    yield _line(f"{key}.{_bare(inner)}", each, resolved.origins[f"{path}.{inner}"])
            elif value is None or (value == () and about.words):
                yield f"{f'# {key} is not set':<{WIDTH}}  # {resolved.origins[path]}"
            else:
                yield _line(key, value, resolved.origins[path])


def _line(key: str, value: Any, origin: str) -> str:
    return f"{f'{key} = {literal(value)}':<{WIDTH}}  # {origin}"


def literal(value: Any) -> str:
    """A value as TOML."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_bare(key)} = {literal(each)}" for key, each in value.items()) + "}"
    return "[" + ", ".join(map(literal, value)) + "]"


def _bare(key: str) -> str:
    return key if key.replace("_", "").replace("-", "").isalnum() and key.isascii() else literal(key)
