"""Weights from a folder of torch.distributed.checkpoint (DCP).

The folder's `.metadata` is pickled. It is read by an unpickler that knows the names of DCP's metadata classes and nothing else,
and puts inert records in their place: no class of DCP, nor of anything else, is called. Each tensor, or part of one, is a file of
`torch.save` inside a larger file, and is read by torch's unpickler for weights (`weights_only`).
"""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from scrimp.errors import RunError

METADATA = ".metadata"
MOST_NBYTES = 1 << 30  # of the metadata
WRAPPERS = ("model", "state_dict", "module", "model_state_dict")  # keys under which programs put a model's state
METADATA_CLASSES = {
    "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties", "MetadataIndex",
    "StorageMeta", "_MEM_FORMAT_ENCODING",
}  # fmt: skip


class _Record:
    """In place of an object of DCP: the name of its class, and its state."""

    name = ""

    def __init__(self, *args: object) -> None:
        self.args = args

    def __setstate__(self, state: object) -> None:
        self.state = state

    def get(self, key: str) -> Any:
        """None where the class has a default, which is not in the file."""
        try:
            return self[key]
        except ValueError:
            return None

    def __getitem__(self, key: str) -> Any:
        state = getattr(self, "state", {})
        if isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], dict):  # of a class with slots
            state = {**(state[0] or {}), **state[1]}
        if not isinstance(state, dict) or key not in state:
            raise ValueError(f"a {self.name} has no {key}")
        return state[key]


class _Metadata(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        known = {
            "torch.distributed.checkpoint.metadata": METADATA_CLASSES,
            "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
            "torch.serialization": {"_get_layout"},
            "pathlib": {"PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"},
            "pathlib._local": {"PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"},
        }
        if name in known.get(module, ()):
            return type(name, (_Record,), {"name": name})
        if (module, name) == ("torch", "Size"):
            return tuple
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is no class of DCP's metadata")

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("it refers to an object outside of it")


@dataclass(frozen=True, kw_only=True)
class _Chunk:
    """A box of a tensor, and where its bytes are."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    path: Path
    start: int
    nbytes: int


def is_dcp(folder: Path) -> bool:
    return (folder / METADATA).is_file()


class DcpFolder:
    """`Weights` of a DCP folder: the tensors of the model in it. Those of an optimizer, and objects, are left."""

    def __init__(self, folder: Path) -> None:
        self.where = str(folder)
        try:
            found = _read_metadata(folder)
            self._chunks = _model_part(folder, found)
        except (pickle.UnpicklingError, ValueError, TypeError, KeyError, AttributeError, IndexError, EOFError) as error:
            raise RunError(f"{folder / METADATA} is no metadata of DCP that can be read: {error}") from None
        if not self._chunks:
            raise RunError(f"{folder} has no tensors")
        self.shapes = {name: shape for name, (shape, _) in self._chunks.items()}

    def read(self, name: str) -> torch.Tensor:
        shape, chunks = self._chunks[name]
        whole: torch.Tensor | None = None
        for chunk in chunks:
            part = self._load(name, chunk)
            if chunk.sizes == shape:
                return part
            if whole is None:
                whole = torch.empty(shape, dtype=part.dtype)
            box = tuple(slice(first, first + size) for first, size in zip(chunk.offsets, chunk.sizes, strict=True))
            whole[box] = part
        assert whole is not None
        return whole

    def _load(self, name: str, chunk: _Chunk) -> torch.Tensor:
        try:
            if chunk.path.stat().st_size < chunk.start + chunk.nbytes:
                raise RunError(f"{chunk.path} is damaged: {name} ends at byte {chunk.start + chunk.nbytes}")
            with chunk.path.open("rb") as file, warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of pickles that torch did not write: they are refused anyway
                file.seek(chunk.start)
                part = torch.load(io.BytesIO(file.read(chunk.nbytes)), map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, pickle.UnpicklingError, EOFError, ValueError) as error:
            raise RunError(f"{name} cannot be read from {chunk.path}: {error}") from error
        if not isinstance(part, torch.Tensor) or tuple(part.shape) != chunk.sizes:
            what = tuple(part.shape) if isinstance(part, torch.Tensor) else type(part).__name__
            raise RunError(f"{chunk.path} is damaged: a part of {name} is {what}, the metadata says {chunk.sizes}")
        return part.detach()


def _read_metadata(folder: Path) -> _Record:
    path = folder / METADATA
    if path.stat().st_size > MOST_NBYTES:
        raise RunError(f"{path} has {path.stat().st_size} bytes, more than metadata has ({MOST_NBYTES} at most)")
    with path.open("rb") as file:
        found = _Metadata(file).load()
    if not isinstance(found, _Record) or found.name != "Metadata":
        raise ValueError("it holds no Metadata")
    return found


def _model_part(folder: Path, metadata: _Record) -> dict[str, tuple[tuple[int, ...], list[_Chunk]]]:
    places: dict[tuple[str, tuple[int, ...]], _Record] = {}
    for index, info in metadata["storage_data"].items():
        if index.get("offset") is not None:
            places[index["fqn"], _numbers(index["offset"])] = info
    tensors = {name: row for name, row in metadata["state_dict_metadata"].items() if row.name == "TensorStorageMetadata"}
    rename = _renaming(tensors, metadata["planner_data"] or {})
    found = {}
    for name, row in tensors.items():
        as_model = rename(name)
        if as_model is None:
            continue
        shape = _numbers(row["size"])
        chunks = [
            _chunk(folder, name, shape, (_numbers(each["offsets"]), _numbers(each["sizes"])), places) for each in row["chunks"]
        ]
        if sum(prod(chunk.sizes) for chunk in chunks) != prod(shape):
            raise ValueError(f"the parts of {name} of shape {shape} have other elements: {[chunk.sizes for chunk in chunks]}")
        found[as_model] = (shape, chunks)
    return found


def _chunk(
    folder: Path,
    name: str,
    shape: tuple[int, ...],
    box: tuple[tuple[int, ...], tuple[int, ...]],
    places: dict[tuple[str, tuple[int, ...]], _Record],
) -> _Chunk:
    offsets, sizes = box
    if len(offsets) != len(shape) or any(o + s > n for o, s, n in zip(offsets, sizes, shape, strict=True)):
        raise ValueError(f"a part of {name} of shape {shape} is at {offsets} with {sizes}")
    info = places[name, offsets]
    path, start, nbytes = info["relative_path"], info["offset"], info["length"]
    if not isinstance(path, str) or Path(path).name != path or path in ("", "..", METADATA):
        raise ValueError(f"{name} is in the file {path!r}, which is not in the folder")
    if info.get("transform_descriptors"):
        raise ValueError(f"{name} was transformed by {info['transform_descriptors']} when it was saved, which is not supported")
    start, nbytes = _numbers((start, nbytes))
    return _Chunk(offsets=offsets, sizes=sizes, path=folder / path, start=start, nbytes=nbytes)


def _numbers(values: Any) -> tuple[int, ...]:
    found = tuple(values)
    if not all(type(value) is int and value >= 0 for value in found):
        raise ValueError(f"{found} are no sizes")
    return found


def _renaming(tensors: dict[str, _Record], paths: dict[str, Any]) -> Callable[[str], str | None]:
    """From a name in the folder to that in the model; None for tensors that are no part of it. A state dict that holds the
    model's under a key, as `{"model": ..., "optimizer": ...}`, has it there only."""
    parts = {name: tuple(map(str, paths.get(name, (name,)))) for name in tensors}
    wrapped = {name: next((k for k, part in enumerate(steps[:-1]) if part in WRAPPERS), None) for name, steps in parts.items()}
    if any(k is not None for k in wrapped.values()):
        return lambda name: None if (k := wrapped[name]) is None else ".".join(parts[name][k + 1 :])
    return lambda name: ".".join(parts[name])
