"""Reads a cluster from TOML; `docs/explanation/cluster.md` describes the format."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from scrimp.cluster._hardware import Hardware, Shares
from scrimp.cluster._link import Link
from scrimp.cluster._presets import KINDS, hardware
from scrimp.errors import ScrimpError
from scrimp.ledger import parse_nbytes

Read = Callable[[Any], Any]


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ScrimpError(f"{value!r} is not a whole number of 1 or more")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ScrimpError(f"{value!r} is not a text")
    return value


def _number(times: float = 1.0, *, per: float = 1.0, zero: bool = False) -> Read:
    """Divides for small units: 5 / 1e6 is exactly the float 5e-6."""

    def read(value: Any) -> float:
        if (
            isinstance(value, bool)
            or not isinstance(value, (int, float))
            or not (0 < value < float("inf") or (zero and value == 0))
        ):
            raise ScrimpError(f"{value!r} is not a number {'of 0 or more' if zero else 'above 0'}")
        return value * times / per

    return read


_LINK: dict[str, tuple[str, Read]] = {
    "latency_us": ("latency_seconds", _number(per=1e6, zero=True)),
    "gb_per_s": ("bytes_per_second", _number(1e9)),
}
_TABLES: dict[str, dict[str, tuple[str, Read]]] = {
    "": {"kind": ("kind", _text), "nodes": ("nodes", _whole), "devices_per_node": ("devices_per_node", _whole)},
    "device": {
        "memory": ("device_memory_nbytes", parse_nbytes),
        "bf16_tflops": ("bf16_flops", _number(1e12)),
        "fp32_tflops": ("fp32_flops", _number(1e12)),
        "memory_gb_per_s": ("device_memory", _number(1e9)),
        "launch_us": ("launch_seconds", _number(per=1e6, zero=True)),
    },
    "host": {"memory": ("host_memory_nbytes", parse_nbytes), "gb_per_s": ("host_link", _number(1e9))},
    "inside": _LINK,
    "between": _LINK,
    "shares": {name: (name, _number()) for name in ("matmul", "memory", "link")},
}


def read_source(source: str | Path) -> tuple[str, str]:
    """The text of a cluster, and its name in errors. A `Path` is a file. A string is one too, unless it has several lines, or no
    file has that name and it looks like TOML (`=`) or JSON (`{`)."""
    reads_like_text = isinstance(source, str) and ("\n" in source or source.lstrip().startswith("{"))
    if isinstance(source, str) and (reads_like_text or ("=" in source and not _is_file(source))):
        if not reads_like_text and source.endswith((".toml", ".json")):
            raise ScrimpError(f"cluster file {source} cannot be read: there is no such file")
        return source, "cluster"
    try:
        return Path(source).read_text(), str(source)
    except (OSError, UnicodeDecodeError) as error:
        raise ScrimpError(f"cluster file {source} cannot be read: {getattr(error, 'strerror', None) or error}") from error


def _is_file(source: str) -> bool:
    try:
        return Path(source).is_file()
    except (OSError, ValueError):  # too long for a name, or with a null in it
        return False


def hardware_of(text: str, name: str) -> Hardware:
    """Parses TOML."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ScrimpError(f"{name} is not TOML: {error}") from error
    return _hardware(data, name)


def _hardware(data: dict[str, Any], name: str) -> Hardware:
    tables = {table: data.pop(table, {}) for table in _TABLES if table}
    read = {table: _read(name, table, rows) for table, rows in {"": data, **tables}.items()}
    top = read[""]
    for key in ("nodes", "devices_per_node"):
        if key not in top:
            raise ScrimpError(f"{name}: '{key}' is missing; it is a whole number of 1 or more")
    kind = top.get("kind", "own")
    if kind in KINDS:
        base = replace(hardware(kind, 1), **top)
        links = {link: replace(getattr(base, link), **read[link]) for link in ("inside", "between")}
        return replace(base, **read["device"], **read["host"], **links, shares=Shares(**read["shares"]))
    for table, rows in _TABLES.items():
        needed = [key for key in rows if table not in ("", "shares") and key != "launch_us"]
        missing = [key for key in needed if rows[key][0] not in read[table]]
        if missing:
            raise ScrimpError(
                f"{name}: '{table}.{missing[0]}' is missing. Give it, or a kind that has it, one of {', '.join(KINDS)}"
            )
    links = {link: Link(**read[link]) for link in ("inside", "between")}
    return Hardware(**{"kind": kind, **top}, **read["device"], **read["host"], **links, shares=Shares(**read["shares"]))


def _read(name: str, table: str, rows: Any) -> dict[str, Any]:
    known = _TABLES[table]
    if not isinstance(rows, dict):
        raise ScrimpError(f"{name}: '{table}' is a table of {', '.join(known)}, not {rows!r}")
    out = {}
    for key, value in rows.items():
        path = f"{table}.{key}" if table else key
        if key not in known:
            keys = [*known, *(other for other in _TABLES if other and not table)]
            raise ScrimpError(
                f"{name}: '{path}' is unknown; {'the top level' if not table else f'[{table}]'} may have {', '.join(keys)}"
            )
        field, read = known[key]
        try:
            out[field] = read(value)
        except ScrimpError as error:
            raise ScrimpError(f"{name}: '{path}': {error}") from None
    return out
