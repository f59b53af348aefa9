"""The manifest of a checkpoint folder: one JSON file, written last.

Every rank's file holds its shards as they are, layer by layer. The manifest says which part of which parameter is where in the
files, so that a reader with another chunk size or number of ranks can read just what it needs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

from scrimp.errors import CheckpointError, check_format

FORMAT, VERSION = "scrimp.checkpoint", 3
READS = (1, 2, 3)  # version 1 has no boxes, versions 1 and 2 have no extra
NAME = "manifest.json"


@dataclass(frozen=True, kw_only=True)
class Extent:
    """Elements [start, start + length) of a parameter, in a rank's file: from `place` on in each of its layer's tensors. With a
    `box` (of each factor of its dims: size, where the box begins, length) they are elements of that part of the parameter."""

    start: int
    length: int
    rank: int
    place: int
    box: tuple[tuple[int, int, int], ...] | None = None


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A parameter: its shape, whether it is trained and is its own master, its number of updates, and the position of its
    elements in the tensors of layer `layer`."""

    shape: tuple[int, ...]
    trainable: bool
    own_master: bool
    count: int
    layer: int
    extents: tuple[Extent, ...]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Settings, counters, files and parameters of a checkpoint."""

    precision: str
    optimizer: str
    states: int
    steps: int
    skipped: int
    loss_scale: tuple[float, int]
    files: tuple[tuple[str, str], ...]  # name, checksum
    entries: dict[str, Entry]
    state: str = "fp32"  # codec of the optimizer's states: "int8" means codes and scales
    groups: tuple[dict[str, Any], ...] = ()  # settings of the optimizer's groups: lr and others; none in old checkpoints
    extra: dict[str, Any] = field(default_factory=dict)  # what the user gave to `save`

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, "version": VERSION, **asdict(self)})

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        try:
            data = json.loads((folder / NAME).read_text())
        except FileNotFoundError:
            raise CheckpointError(f"{folder} has no {NAME}: it is no checkpoint, or one that was never completed") from None
        except json.JSONDecodeError as error:
            raise CheckpointError(f"{folder / NAME} is damaged: {error}") from None
        check_format(data, FORMAT, READS, CheckpointError)
        del data["format"], data["version"]
        entries = {
            name: Entry(**{**row, "shape": tuple(row["shape"]), "extents": tuple(map(_extent, row["extents"]))})
            for name, row in data.pop("entries").items()
        }
        files = tuple((name, checksum) for name, checksum in data.pop("files"))
        for name, _ in files:
            if Path(name).name != name:
                raise CheckpointError(f"{folder / NAME} names the file '{name}', which is not in its own folder")
        value, good = data.pop("loss_scale")
        data["groups"] = tuple(data.get("groups", ()))
        return cls(entries=entries, files=files, loss_scale=(value, good), **data)


def _extent(row: dict[str, Any]) -> Extent:
    box = row.get("box")
    return Extent(**{**row, "box": None if box is None else tuple(map(tuple, box))})


def checksum(path: Path) -> bytes:
    digest = hashlib.blake2b(digest_size=32)
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.digest()


def checked_extra(extra: Mapping[str, Any] | None) -> dict[str, Any]:
    """What `load` will return for it: JSON, so tuples become lists. Raises where JSON would lose or change something."""
    if extra is None:
        return {}
    if not isinstance(extra, Mapping):
        raise CheckpointError(f"extra is a {type(extra).__name__}; give a mapping, such as {{'position': 1200}}")
    return {name: _as_json(value, f"extra[{name!r}]") for name, value in _named(extra, "extra")}


def _as_json(value: Any, where: str) -> Any:
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        if not isfinite(value):
            raise CheckpointError(f"{where} is {value}, which JSON does not have; save it as text")
        return value
    if isinstance(value, list | tuple):
        return [_as_json(item, f"{where}[{k}]") for k, item in enumerate(value)]
    if isinstance(value, Mapping):
        return {name: _as_json(item, f"{where}[{name!r}]") for name, item in _named(value, where)}
    raise CheckpointError(
        f"{where} is a {type(value).__name__}: a manifest holds JSON, so numbers, text, true, false, none, lists and mappings; "
        "convert it, for a tensor with .tolist()"
    )


def _named(values: Mapping[Any, Any], where: str) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if not isinstance(name, str):
            raise CheckpointError(f"{where} has the key {name!r}, a {type(name).__name__}: keys in JSON are text")
        yield name, value
