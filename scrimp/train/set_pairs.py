"""Parses `--set name=value`, which several commands have."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from scrimp.errors import ScrimpError


def pairs(settings: Sequence[str], such_as: str) -> Iterator[tuple[str, str]]:
    seen: set[str] = set()
    for text in settings:
        name, equals, value = text.partition("=")
        name = name.strip()
        if not equals or not name or not value.strip():
            raise ScrimpError(f"--set {text}: write it as name=value, such as {such_as}")
        if name in seen:
            raise ScrimpError(f"--set {text}: {name} is set twice")
        seen.add(name)
        yield name, value
