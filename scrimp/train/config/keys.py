"""Keys of a section: the values that each may have, its meaning, and whether it names a file. Torch is not loaded.

A key is a field of a frozen dataclass. Its metadata hold a `Key`. `None` as default means "not set".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from scrimp.errors import ScrimpError
from scrimp.ledger import parse_nbytes

LARGEST = 2**31 - 1
_KEY = "key"
INPUT, OUTPUT, NAME = "input", "output", "name"  # a file that is read; one that is written; a name, or a file that is read


@dataclass(frozen=True, kw_only=True)
class Key:
    """`words`: the possible values, as text after "it must be". `path`: what kind of file it names, if any."""

    words: str
    accepts: Callable[[Any], bool]
    meaning: str
    path: str | None = None
    optional: bool = False
    required: bool = False


def keys_of(section: Any) -> dict[str, Key]:
    """The keys of a section, or of its class, by name."""
    return {each.name: each.metadata[_KEY] for each in fields(section)}


def whole(default: int | None, meaning: str, *, least: int = 1, most: int = LARGEST) -> Any:
    words = f"a whole number of {least} or more" if most == LARGEST else f"a whole number from {least} to {most:,}"
    return _key(default, words, lambda value: _is_int(value) and least <= value <= most, meaning)


def number(
    default: float | None, meaning: str, *, above: float | None = None, least: float = 0.0, most: float = float("inf")
) -> Any:
    """A number from `least` (or more than `above`) to `most`."""
    low = f"above {above:g}" if above is not None else f"from {least:g}"
    words = f"a number {low}" + (f" to {most:g}" if most < float("inf") else "")

    def accepts(value: Any) -> bool:
        if not (_is_int(value) or isinstance(value, float)) or not value < float("inf"):
            return False
        return bool(value > above if above is not None else value >= least) and bool(value <= most)

    return _key(default, words, accepts, meaning)


def pair(default: tuple[float, float] | None, meaning: str) -> Any:
    def accepts(value: Any) -> bool:
        return isinstance(value, (list, tuple)) and len(value) == 2 and all(_is_share(each) for each in value)

    return _key(default, "two numbers from 0 to below 1, such as [0.9, 0.95]", accepts, meaning)


def flag(default: bool, meaning: str) -> Any:
    return _key(default, "true or false", lambda value: isinstance(value, bool), meaning)


def text(default: str | None, meaning: str, *, path: str | None = None, required: bool = False) -> Any:
    return _key(default, "a text", _is_text, meaning, path, required=required)


def texts(meaning: str, *, path: str | None = None) -> Any:
    def accepts(value: Any) -> bool:
        return _is_text(value) or (isinstance(value, (list, tuple)) and bool(value) and all(map(_is_text, value)))

    return _key((), "a text, or a list of texts", accepts, meaning, path)


def one_of(default: str | None, names: tuple[str, ...], meaning: str) -> Any:
    return _key(default, " or ".join(f"'{name}'" for name in names), lambda value: value in names, meaning)


def function_or(default: str, names: tuple[str, ...], meaning: str) -> Any:
    """One of the names, or module:function."""
    words = f"{', '.join(repr(name) for name in names)}, or 'module:function'"
    return _key(default, words, lambda value: value in names or is_function(value), meaning)


def size(default: str | None, meaning: str) -> Any:
    """A size of memory."""

    def accepts(value: Any) -> bool:
        try:
            return value == "auto" or parse_nbytes(value) > 0
        except ScrimpError:
            return False

    return _key(default, "'auto', or a size such as '24GiB'", accepts, meaning)


def table(meaning: str) -> Any:
    return _key(None, "a table of settings", lambda value: isinstance(value, Mapping), meaning, factory=dict)


def tables(meaning: str) -> Any:
    def accepts(value: Any) -> bool:
        return isinstance(value, (list, tuple)) and all(isinstance(each, Mapping) for each in value)

    return _key((), "a list of tables", accepts, meaning)


def is_function(value: Any) -> bool:
    """Whether a text reads as module:function."""
    if not isinstance(value, str):
        return False
    module, colon, function = value.partition(":")
    return bool(colon) and all(part.isidentifier() for part in (*module.split("."), function))


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_share(value: Any) -> bool:
    return (_is_int(value) or isinstance(value, float)) and 0 <= value < 1


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _key(
    default: Any, words: str, accepts: Callable[[Any], bool], meaning: str, path: str | None = None, *, required: bool = False,
    factory: Callable[[], Any] | None = None,
) -> Any:  # fmt: skip
    key = Key(
        words=words, accepts=accepts, meaning=meaning, path=path, optional=default is None and factory is None, required=required
    )
    if factory is not None:
        return field(default_factory=factory, metadata={_KEY: key})
    return field(default=default, metadata={_KEY: key})
