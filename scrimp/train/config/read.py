"""Reads a configuration: a TOML file, then --set, then defaults. Every wrong key or value is an error that names both sides.

Files that a configuration names are relative to its folder; those in --set, and what a run writes, to the current folder.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from scrimp.errors import ScrimpError
from scrimp.train.config.consistent import check_consistent
from scrimp.train.config.keys import INPUT, NAME, OUTPUT, Key, is_function, keys_of
from scrimp.train.config.resolved import DEFAULT, SET, Resolved
from scrimp.train.config.sections import SECTIONS, Config
from scrimp.train.set_pairs import pairs

SUCH_AS = "train.steps=100"
Table = Mapping[str, Any]


def read_config(path: str | Path, settings: Sequence[str] = ()) -> Resolved:
    """The configuration of a file. `settings`: texts such as "train.steps=100", which override the file."""
    path = Path(path)
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ScrimpError(
            f"there is no {path}: give a configuration, such as examples/gpt.toml, or with --resume a run"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ScrimpError(f"{path} cannot be read: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise ScrimpError(f"{path} is not TOML: {error}") from error
    return resolve(data, settings, name=path.name, folder=path.resolve().parent)


def resolve(data: Table, settings: Sequence[str] = (), *, name: str, folder: Path) -> Resolved:
    """`data`: the parsed file, `folder`: where it is."""
    values: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    origins: dict[str, str] = {}
    for section, keys in data.items():
        _check_section(name, section, keys)
        for key, value in keys.items():
            _put(values, origins, name, section, key, value, name, folder)
    for dotted, text in pairs(settings, SUCH_AS):
        section, key, inner = _split(dotted, text)
        value = _value(text)
        _put(values, origins, f"--set {dotted}={text}", section, key, {inner: value} if inner else value, SET, Path.cwd())
    for section, kind in SECTIONS.items():
        for key, about in keys_of(kind).items():
            if key not in values[section] and about.required:
                raise ScrimpError(f"{name}: [{section}] {key} is missing; it is {_small(about.meaning)}")
            if about.words != "a table of settings":
                origins.setdefault(f"{section}.{key}", DEFAULT)
    made = {section: kind(**values[section]) for section, kind in SECTIONS.items()}
    resolved = Resolved(config=Config(**made), origins=origins, name=name)
    check_consistent(resolved)
    return resolved


def _put(
    values: dict[str, dict[str, Any]], origins: dict[str, str], where: str, section: str, key: str, value: Any, origin: str,
    folder: Path,
) -> None:  # fmt: skip
    known = keys_of(SECTIONS[section])
    if key not in known:
        raise ScrimpError(f"{where}: [{section}] has no key '{key}'; {_hint(key, [*known], 'it has')}")
    about = known[key]
    if not about.accepts(value):
        raise ScrimpError(f"{where}: [{section}] {key} is {_shown(value)}; it must be {about.words}")
    path = f"{section}.{key}"
    if isinstance(value, Mapping):
        values[section][key] = {**values[section].get(key, {}), **value}
        origins.update({f"{path}.{inner}": origin for inner in value})
        return
    values[section][key] = _placed(about, _normal(about, value), folder)
    origins[path] = origin


def _normal(about: Key, value: Any) -> Any:
    """Lists as tuples; a single text where several may be as one of them."""
    if about.words == "a text, or a list of texts" and isinstance(value, str):
        return (value,)
    return tuple(value) if isinstance(value, list) else value


def _placed(about: Key, value: Any, folder: Path) -> Any:
    """Absolute paths, so that a saved configuration means the same elsewhere."""
    if isinstance(value, tuple) and about.path is not None:
        return tuple(_placed(about, each, folder) for each in value)
    if about.path == OUTPUT:
        return str(Path(value).absolute())
    if about.path == INPUT or (about.path == NAME and not is_function(value) and (folder / value).exists()):
        return str(folder / value)
    return value


def _check_section(name: str, section: str, keys: Any) -> None:
    if section not in SECTIONS and not isinstance(keys, Mapping):
        there = [known for known, kind in SECTIONS.items() if section in keys_of(kind)]
        words = f"write it below [{there[0]}]" if there else f"sections are {', '.join(SECTIONS)}"
        raise ScrimpError(f"{name}: '{section}' is in no section; {words}")
    if section not in SECTIONS:
        raise ScrimpError(f"{name}: there is no section [{section}]; {_hint(section, [*SECTIONS], 'there are')}")
    if not isinstance(keys, Mapping):
        raise ScrimpError(f"{name}: '{section}' is {_shown(keys)}; it must be a section, [{section}]")


def _split(dotted: str, text: str) -> tuple[str, str, str]:
    section, _, rest = dotted.partition(".")
    key, _, inner = rest.partition(".")
    where = f"--set {dotted}={text}"
    if not rest or not key:
        there = [known for known, kind in SECTIONS.items() if dotted in keys_of(kind)]
        example = f"{there[0]}.{dotted}={text}" if there else SUCH_AS
        raise ScrimpError(f"{where}: write section.key=value, such as {example}")
    if section not in SECTIONS:
        raise ScrimpError(f"{where}: there is no section [{section}]; {_hint(section, [*SECTIONS], 'there are')}")
    return section, key, inner


def _value(text: str) -> Any:
    """A TOML value; otherwise the text itself, so that quotes are not needed."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (tomllib.TOMLDecodeError, KeyError):
        return text.strip()


def _hint(given: str, known: list[str], words: str) -> str:
    """The nearest known name; else all of them."""
    near = get_close_matches(given, known, 1, 0.5)
    return f"did you mean '{near[0]}'?" if near else f"{words} {', '.join(known)}"


def _shown(value: Any) -> str:
    kinds = {str: "the text ", int: "the number ", float: "the number ", list: "the list "}
    shown = repr(value).lower() if isinstance(value, bool) else repr(value)
    return kinds.get(type(value), "") + (shown if len(shown) < 80 else f"{shown[:77]}...")


def _small(text: str) -> str:
    return text[0].lower() + text[1:].rstrip(".")
