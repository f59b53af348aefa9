"""The manifest of a checkpoint folder: one JSON file, written last.

Every rank's file holds its shards as they are, layer by layer. The manifest says which part of which parameter is where in the
files, so that a reader with another chunk size or number of ranks can read just what it needs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from math import isfinite, prod
from pathlib import Path
from typing import Any

from scrimp.errors import CheckpointError, check_format

FORMAT, VERSION = "scrimp.checkpoint", 4
# Version 1 has no boxes, versions 1 and 2 have no extra, and up to version 3 a file has one checksum for all of its tensors.
READS = (1, 2, 3, 4)
NAME = "manifest.json"
MOST_NBYTES = 1 << 29  # of a manifest


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
class FileRow:
    """A file: its size, and checksums of its header and of each tensor. Up to version 3: one `checksum` of all of it."""

    name: str
    nbytes: int | None = None
    header: str | None = None
    tensors: dict[str, str] = field(default_factory=dict)
    checksum: str | None = None


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Settings, counters, files and parameters of a checkpoint."""

    precision: str
    optimizer: str
    states: int
    steps: int
    skipped: int
    loss_scale: tuple[float, int]
    files: tuple[FileRow, ...]
    entries: dict[str, Entry]
    state: str = "fp32"  # codec of the optimizer's states: "int8" means codes and scales
    groups: tuple[dict[str, Any], ...] = ()  # settings of the optimizer's groups: lr and others; none in old checkpoints
    extra: dict[str, Any] = field(default_factory=dict)  # what the user gave to `save`
    version: int = VERSION  # of the file that was read

    def to_json(self) -> str:
        files = [{"name": f.name, "nbytes": f.nbytes, "header": f.header, "tensors": f.tensors} for f in self.files]
        data = {"format": FORMAT, **asdict(replace(self, files=(), version=VERSION)), "files": files}
        return json.dumps({**data, "checksum": _checksum(data)})

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Nothing of it is trusted: whatever makes no sense raises `CheckpointError`."""
        where = folder / NAME
        try:
            size = where.stat().st_size
            if size > MOST_NBYTES:
                raise CheckpointError(f"{where} has {size} bytes, which is more than a manifest has ({MOST_NBYTES} at most)")
            data = json.loads(where.read_text())
        except (FileNotFoundError, NotADirectoryError):
            raise CheckpointError(f"{folder} has no {NAME}: it is no checkpoint, or one that was never completed") from None
        except (OSError, ValueError, RecursionError) as error:
            raise CheckpointError(f"{where} is damaged: {error}") from None
        if not isinstance(data, dict):
            raise CheckpointError(f"{where} is damaged: it is no JSON object")
        check_format(data, FORMAT, READS, CheckpointError)
        if data["version"] >= 4 and (wanted := data.pop("checksum", None)) != (found := _checksum(data)):
            raise CheckpointError(f"{where} is damaged: its checksum is {found[:16]}..., it says {str(wanted)[:16]}...")
        try:
            return cls._of(data)
        except CheckpointError as error:
            raise CheckpointError(f"{where} {error}") from None
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{where} is damaged: {type(error).__name__}: {error}") from None

    @classmethod
    def _of(cls, data: dict[str, Any]) -> Manifest:
        version = data["version"]
        del data["format"]
        entries = {
            name: Entry(**{**row, "shape": tuple(row["shape"]), "extents": tuple(map(_extent, row["extents"]))})
            for name, row in data.pop("entries").items()
        }
        rows = data.pop("files")
        files = tuple(FileRow(**row) if version >= 4 else FileRow(name=row[0], checksum=row[1]) for row in rows)
        for file in files:
            if Path(file.name).name != file.name or "\\" in file.name or "\0" in file.name or file.name in ("", "..", NAME):
                raise CheckpointError(f"names the file {file.name!r}, which is not in its own folder")
        if len({file.name for file in files}) != len(files):
            raise CheckpointError("names a file twice")
        for name, entry in entries.items():
            _check_entry(name, entry, len(files))
        value, good = data.pop("loss_scale")
        data["groups"] = tuple(data.get("groups", ()))
        return cls(entries=entries, files=files, loss_scale=(value, good), **data)


def _check_entry(name: str, entry: Entry, files: int) -> None:
    """Its extents must have as many elements as the parameter, so that nobody allocates what no file has."""
    numbers = [*entry.shape, entry.layer, entry.count]
    for each in entry.extents:
        numbers += [each.start, each.length, each.rank, each.place, *(n for factor in each.box or () for n in factor)]
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise CheckpointError(f"is damaged: {name} has a number that is none, or below 0")
    total, numel = sum(each.length for each in entry.extents), prod(entry.shape)
    if total != numel or any(each.rank >= files for each in entry.extents):
        raise CheckpointError(
            f"is damaged: {name} of shape {entry.shape} has {numel} elements, its parts in {files} files have {total}"
        )
    ends: dict[Any, int] = {}
    for each in sorted(entry.extents, key=lambda each: each.start):
        inside = each.box is None or (
            prod(size for size, _, _ in each.box) == numel and all(first + length <= size for size, first, length in each.box)
        )
        if not inside or each.start != ends.get(each.box, 0):
            raise CheckpointError(
                f"is damaged: a part of {name} of shape {entry.shape} lies outside of it, or on another: {each}"
            )
        ends[each.box] = each.start + each.length
    wanted = {box: numel if box is None else prod(length for _, _, length in box) for box in ends}
    if wanted != ends:
        raise CheckpointError(f"is damaged: the parts of {name} of shape {entry.shape} end at {ends}, not at {wanted}")


def _checksum(data: Mapping[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(data).encode(), digest_size=32).hexdigest()


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
