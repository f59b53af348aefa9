"""Settings of a model: type, range, parsing of text, and the error for a wrong value.

`whole`, `number`, `flag`, `one_of`, `widths` or `only_python` make a field of a configuration, and `Checked` checks every value
when a configuration is made. Torch is not loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

LARGEST = 2**31 - 1
DEEPEST = 10_000  # layers, or blocks of a stage: each is built as a module
_KEY = "setting"
_FLAGS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """`words`: the possible values, as text after "it is". `read`: parses a text; returns the text itself if it cannot."""

    words: str
    accepts: Callable[[Any], bool]
    read: Callable[[str], Any]


class Checked:
    """The base of configurations: a wrong value raises a `ValueError` that lists the possible ones."""

    def __post_init__(self) -> None:
        for name, setting in settings_of(self).items():
            value = getattr(self, name)
            if not setting.accepts(value):
                raise ValueError(f"{name} cannot be {value!r}: it is {setting.words}")


def settings_of(config: Any) -> dict[str, Setting]:
    """The settings of a configuration, or of its class, by name."""
    return {each.name: each.metadata[_KEY] for each in fields(config)}


def whole(default: int, *, most: int = LARGEST) -> Any:
    return _field(default, _whole(most))


def number(default: float, least: float = 0.0, *, above: bool = False, below: float = float("inf")) -> Any:
    """A number from `least` (or `above` it) to below `below`."""

    def accepts(value: Any) -> bool:
        return (
            isinstance(value, (int, float))
            and not isinstance(value, bool)
            and least <= value < below
            and not (above and value == least)
        )

    words = f"a number {'above' if above else 'from'} {least:g}" + (f" to below {below:g}" if below < float("inf") else "")
    return _field(default, Setting(words=words, accepts=accepts, read=_float))


def flag(default: bool) -> Any:
    def read(text: str) -> Any:
        return _FLAGS.get(text.lower(), text)

    return _field(default, Setting(words="true or false", accepts=lambda value: isinstance(value, bool), read=read))


def one_of(default: str, *names: str) -> Any:
    words = " or ".join(f"'{name}'" for name in names)
    return _field(default, Setting(words=words, accepts=lambda value: value in names, read=str))


def widths(default: tuple[Any, ...], *, nested: bool = False, most: int = LARGEST) -> Any:
    """One or more whole numbers; `nested`: groups of them."""
    one = _whole(most)

    def row(value: Any) -> bool:
        return isinstance(value, tuple) and bool(value) and all(map(one.accepts, value))

    def read_row(text: str) -> tuple[Any, ...]:
        return tuple(one.read(part.strip()) for part in text.split(","))

    if nested:
        return _field(
            default,
            Setting(
                words="groups of whole numbers of 1 or more, such as 64,64/128,128",
                accepts=lambda value: isinstance(value, tuple) and bool(value) and all(map(row, value)),
                read=lambda text: tuple(map(read_row, text.split("/"))),
            ),
        )
    return _field(
        default, Setting(words=f"{one.words}, one or more joined by commas, such as 2,2,2,2", accepts=row, read=read_row)
    )


def only_python(default: Any) -> Any:
    """A function, which cannot be given as text."""
    words = "None or a function, which only Python can give"
    return _field(default, Setting(words=words, accepts=lambda value: value is None or callable(value), read=str))


def _whole(most: int) -> Setting:
    return Setting(
        words=f"a whole number from 1 to {most:,}",
        accepts=lambda value: isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= most,
        read=_int,
    )


def _field(default: Any, setting: Setting) -> Any:
    return field(default=default, metadata={_KEY: setting})


def _int(text: str) -> Any:
    try:
        return int(text)
    except ValueError:
        return text


def _float(text: str) -> Any:
    try:
        return float(text)
    except ValueError:
        return text
