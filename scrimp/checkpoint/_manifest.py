"""The manifest of a checkpoint folder: one JSON file, written last.

Every rank's file holds its shards as they are, layer by layer. The manifest says which part of which parameter is where in the
files, so that a reader with another chunk size or number of ranks can read just what it needs.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from scrimp.errors import CheckpointError, check_format

FORMAT, VERSION = "scrimp.checkpoint", 2
READS = (1, 2)  # version 1 has no boxes
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
