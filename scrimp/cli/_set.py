"""`--set name=value`, as several commands have it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from scrimp.errors import ScrimpError


def pairs(settings: Sequence[str], such_as: str) -> Iterator[tuple[str, str]]:
    for text in settings:
        name, equals, value = text.partition("=")
        if not equals:
            raise ScrimpError(f"--set {text}: write it as name=value, such as {such_as}")
        yield name, value
