"""Sources of weights: a mapping, a .safetensors file, a Hugging Face folder, or a DCP folder; read one tensor at a time.

A file is reopened for every tensor, because an open one keeps every page that was read mapped, which would become a second copy
of the model in memory. Nothing is unpickled but a DCP folder, by unpicklers that call nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol, TypeAlias

import torch
from safetensors import SafetensorError, safe_open

from scrimp.engine.sources.dcp_private import DcpFolder, is_dcp
from scrimp.errors import RunError

Source: TypeAlias = Mapping[str, torch.Tensor] | str | Path

ONE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


class Weights(Protocol):
    """Named tensors. Error messages call them `where`; `shapes` has every name."""

    where: str
    shapes: dict[str, tuple[int, ...]]

    def read(self, name: str) -> torch.Tensor: ...


def open_weights(source: Source) -> Weights:
    if isinstance(source, Mapping):
        return _Given(source)
    if not isinstance(source, (str, Path)):
        raise RunError(f"weights={type(source).__name__}: give a mapping of names to tensors, a .safetensors file, or a folder")
    path = Path(source)
    if not path.exists():
        raise RunError(f"weights={str(path)!r}: there is no such file or folder (models are not downloaded)")
    if path.is_dir():
        return _folder(path)
    if path.suffix in PICKLED:
        raise RunError(_convert(path))
    if path.name.endswith(".index.json"):
        return _Files(str(path), _shards(path))
    return _Files(str(path), dict.fromkeys(_header(path), path))


class _Given:
    """Weights from a state dict."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.where = "the state dict"
        for name, tensor in tensors.items():
            if not isinstance(tensor, torch.Tensor) or tensor.is_meta:
                what = "a tensor on meta" if isinstance(tensor, torch.Tensor) else type(tensor).__name__
                raise RunError(f"weights[{name!r}] is {what}; the state dict must hold tensors with values")
        self.shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        self._tensors = tensors

    def read(self, name: str) -> torch.Tensor:
        return self._tensors[name].detach()


class _Files:
    """Weights from one or several .safetensors files; `files` maps each tensor to its file."""

    def __init__(self, where: str, files: dict[str, Path]) -> None:
        self.where = where
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._files = files
        headers = {path: _header(path) for path in dict.fromkeys(files.values())}
        for name, path in files.items():
            if name not in headers[path]:
                raise RunError(f"{where} says that {name} is in {path.name}, which does not have it")
            self.shapes[name] = headers[path][name]

    def read(self, name: str) -> torch.Tensor:
        path = self._files[name]
        try:
            with safe_open(path, "pt") as file:
                tensor: torch.Tensor = file.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise RunError(f"{name} cannot be read from {path}: {error}") from error
        return tensor


def _folder(folder: Path) -> Weights:
    if is_dcp(folder):
        return DcpFolder(folder)
    if (folder / INDEX).exists():
        return _Files(str(folder), _shards(folder / INDEX))
    if (folder / ONE).exists():
        return _Files(str(folder), dict.fromkeys(_header(folder / ONE), folder / ONE))
    names = sorted(path.name for path in folder.iterdir())
    pickled = [folder / name for name in names if Path(name).suffix in PICKLED]
    if pickled:
        raise RunError(_convert(pickled[0]))
    if "manifest.json" in names:
        raise RunError(f"{folder} is a checkpoint of scrimp: build the engine without weights=, then call engine.load(folder)")
    raise RunError(f"{folder} has neither {ONE} nor {INDEX}; it has {', '.join(names[:8]) or 'nothing'}")


def _shards(index: Path) -> dict[str, Path]:
    try:
        rows = json.loads(index.read_text())["weight_map"]
        files = {str(name): str(file) for name, file in rows.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunError(f"{index} is damaged: no weight_map can be read from it ({type(error).__name__}: {error})") from error
    for file in sorted({*files.values()}):
        if Path(file).name != file:
            raise RunError(f"{index} names the file {file!r}, which is not in its own folder")
        if not (index.parent / file).exists():
            raise RunError(f"{index.parent / file} is missing; {index.name} says that {_count(files, file)} tensors are in it")
    return {name: index.parent / file for name, file in files.items()}


def _count(files: dict[str, str], wanted: str) -> int:
    return sum(file == wanted for file in files.values())


def _header(path: Path) -> dict[str, tuple[int, ...]]:
    try:
        with safe_open(path, "pt") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - no dict
    except (OSError, SafetensorError) as error:
        raise RunError(f"{path} is damaged, or is no safetensors file ({path.stat().st_size} bytes): {error}") from error


def _convert(path: Path) -> str:
    return (
        f"{path} is pickled, and unpickling can run any code; convert it where you trust it: "
        f"safetensors.torch.save_file(torch.load({path.name!r}, weights_only=True), {path.with_suffix('.safetensors').name!r})"
    )
