"""`export(engine_or_checkpoint, folder)`: the weights as a Hugging Face folder, or as one safetensors file.

Each parameter is read, cast and written in parts of a few million elements, so memory does not grow with the model.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from scrimp.checkpoint import Checkpoint, ShardFile
from scrimp.chunks import DTYPES, Wire
from scrimp.engine import Engine, parameter_parts, parameter_sizes
from scrimp.errors import CheckpointError, ScrimpError
from scrimp.ledger import parse_nbytes

if TYPE_CHECKING:
    from torch import nn

NAME, INDEX, CONFIG = "model{}.safetensors", "model.safetensors.index.json", "config.json"
METADATA = {"format": "pt"}  # without which transformers refuses a file
COPIED = (
    "config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*",
    "merges.txt", "chat_template*", "*preprocessor_config.json", "processor_config.json", "*.model", "*.tiktoken", "LICENSE*",
)  # fmt: skip
NAMES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}

Size = tuple[str, tuple[int, ...], torch.dtype]


@dataclass(frozen=True, kw_only=True)
class _Source:
    """What is exported: sizes first, then the values, in the same order."""

    sizes: list[Size]
    values: Iterator[tuple[str, Iterator[torch.Tensor]]]
    model: nn.Module | None = None


def export(
    source: Engine | str | Path,
    folder: str | Path,
    dtype: str | torch.dtype | None = None,
    max_shard: int | str = "5GB",
    files_from: str | Path | None = None,
) -> list[str]:
    """Write weights for transformers and other tools: a folder of safetensors files with index, config and tokenizer, or one
    file if `folder` ends in .safetensors. Returns the names of the files of weights.

    The values are the fp32 masters of trained parameters, cast to `dtype` ("bf16", "fp16" or "fp32"; the precision of the run by
    default). A tied parameter is written once. The folder must be new or empty, and appears complete or not at all. With several
    ranks every rank calls this, and rank 0 writes.

    Arguments:
        source: An engine, or the folder of a checkpoint, whose checksums are compared first.
        folder: The target.
        dtype: Of floating-point tensors.
        max_shard: The most that a file of a folder takes.
        files_from: A Hugging Face folder, whose config, tokenizer and similar files are copied. The config of an engine's model
            comes from the model. A checkpoint has none, so it needs this for a folder.

    >>> import scrimp
    >>> from scrimp import zoo
    >>> from scrimp.ext import hf
    >>> with scrimp.Engine(zoo.build("gpt-tiny"), memory="1GiB", device="cpu") as engine:
    ...     hf.export(engine, "model.safetensors")
    ['model.safetensors']
    """
    goal, opened = Path(os.path.abspath(folder)), source if isinstance(source, Engine) else Checkpoint(source)
    wire = opened._run.wire if isinstance(opened, Engine) else None
    error: BaseException | None = None
    try:
        check_export(opened, goal, dtype, max_shard, files_from)
        if isinstance(opened, Checkpoint):
            opened.verify()
    except ScrimpError as caught:
        error = caught
    _agree(wire, goal, error)
    kind = _dtype(dtype)
    given = _of_engine(opened, kind) if isinstance(opened, Engine) else _of_checkpoint(opened, kind)
    one = goal.suffix == ".safetensors"
    shards = [given.sizes] if one else list(_shards(given.sizes, parse_nbytes(max_shard)))
    names = [goal.name] if one else _names(len(shards))
    if wire is not None and wire.rank:
        for _, parts in given.values:
            for _ in parts:  # rank 0 needs this rank's share of each
                pass
        _agree(wire, goal, None)
        return names
    work = goal.with_name(goal.name + ".unfinished")
    try:
        _write(given, shards, names, work, one=one)
        if not one:
            _index(work, names, shards)
            _other_files(work, given.model, files_from, kind or _usual(given.sizes))
        os.replace(work / goal.name if one else work, goal)
    except (OSError, ScrimpError) as caught:
        error = caught
    finally:
        for _, parts in given.values:  # the other ranks go through all of it
            for _ in parts:
                pass
        shutil.rmtree(work, ignore_errors=True)
    _agree(wire, goal, error)
    return names


def check_export(
    source: Engine | Checkpoint, goal: Path, dtype: str | torch.dtype | None, max_shard: int | str, files_from: str | Path | None
) -> None:
    """Raise if the arguments make no sense, before anything is read."""
    _dtype(dtype)
    if parse_nbytes(max_shard) <= 0:
        raise CheckpointError(f"max_shard={max_shard!r}: a file takes more than that")
    if goal.suffix == ".safetensors":
        if goal.is_dir():
            raise CheckpointError(
                f"{goal} is a folder; give the name of a file, or of a folder that does not end in .safetensors"
            )
        return
    if goal.exists() and (not goal.is_dir() or any(goal.iterdir())):
        raise CheckpointError(f"{goal} exists, and is not an empty folder: export to a new one")
    has_config = isinstance(source, Engine) and _config(source._run.model) is not None
    if files_from is None and not has_config:
        what = "the model has no config" if isinstance(source, Engine) else "a checkpoint has no config"
        raise CheckpointError(
            f"{goal} would be no folder that transformers can load, because {what}: give files_from= (--files-from) a Hugging "
            "Face folder of the same model, or export to a file that ends in .safetensors"
        )
    if files_from is not None and not has_config and not (Path(files_from) / CONFIG).is_file():
        raise CheckpointError(f"files_from={str(files_from)!r} has no {CONFIG}")


def _dtype(given: str | torch.dtype | None) -> torch.dtype | None:
    if given is None:
        return None
    name = str(given).removeprefix("torch.")
    name = NAMES.get(name, name)
    if name not in DTYPES:
        raise CheckpointError(f"dtype={given!r}: give bf16, fp16 or fp32")
    return DTYPES[name]


def _cast(dtype: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    return wanted if wanted is not None and dtype.is_floating_point else dtype


def _of_engine(engine: Engine, wanted: torch.dtype | None) -> _Source:
    sizes = [(name, shape, _cast(dtype, wanted)) for name, shape, dtype, _ in parameter_sizes(engine)]
    values = ((each.name, each.parts) for each in parameter_parts(engine))
    return _Source(sizes=sizes, values=values, model=engine._run.model)


def _of_checkpoint(checkpoint: Checkpoint, wanted: torch.dtype | None) -> _Source:
    sizes: list[Size] = []
    for name, entry in checkpoint.manifest.entries.items():
        _, field = next(checkpoint.tensors(entry))
        sizes.append((name, entry.shape, _cast(field.dtype, wanted)))
    buffers = {name.removeprefix("buffer."): t for name, t in checkpoint.small(0).items() if name.startswith("buffer.")}
    sizes += [(name, tuple(tensor.shape), _cast(tensor.dtype, wanted)) for name, tensor in buffers.items()]

    def values() -> Iterator[tuple[str, Iterator[torch.Tensor]]]:
        for name in checkpoint.manifest.entries:
            yield name, checkpoint.values(name)
        for name, tensor in buffers.items():
            yield name, iter([tensor.reshape(-1)])

    return _Source(sizes=sizes, values=values())


def _nbytes(size: Size) -> int:
    return prod(size[1]) * size[2].itemsize


def _shards(sizes: list[Size], most: int) -> Iterator[list[Size]]:
    """Neighbours in one file, as long as they fit; a larger tensor gets a file of its own."""
    shard, total = list[Size](), 0
    for size in sizes:
        if shard and total + _nbytes(size) > most:
            yield shard
            shard, total = [], 0
        shard.append(size)
        total += _nbytes(size)
    yield shard


def _names(count: int) -> list[str]:
    return [NAME.format("" if count == 1 else f"-{k + 1:05d}-of-{count:05d}") for k in range(count)]


def _write(given: _Source, shards: list[list[Size]], names: list[str], work: Path, *, one: bool) -> None:
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    with ExitStack() as stack:
        for name, shard in zip(names, shards, strict=True):
            file = ShardFile(work / name, [(each, dtype, shape) for each, shape, dtype in shard], METADATA)
            stack.callback(file.abandon)
            for each, _, dtype in shard:
                there, parts = next(given.values)
                assert there == each, (there, each)
                for part in parts:
                    file.append(each, part.to(dtype).view(-1) if part.numel() else part.to(dtype))
            file.close()


def _index(work: Path, names: list[str], shards: list[list[Size]]) -> None:
    if len(names) == 1:
        return
    rows = {each[0]: name for name, shard in zip(names, shards, strict=True) for each in shard}
    total = {"total_size": sum(_nbytes(each) for shard in shards for each in shard)}
    (work / INDEX).write_text(json.dumps({"metadata": total, "weight_map": rows}, indent=2))


def _usual(sizes: list[Size]) -> torch.dtype:
    """The dtype of most elements."""
    found: dict[torch.dtype, int] = {}
    for _, shape, dtype in sizes:
        if dtype.is_floating_point:
            found[dtype] = found.get(dtype, 0) + prod(shape)
    return max(found, key=lambda dtype: found[dtype], default=torch.float32)


def _config(model: nn.Module | None) -> Any:
    config = getattr(model, "config", None)
    return config if hasattr(config, "save_pretrained") and hasattr(config, "to_dict") else None


def _other_files(work: Path, model: nn.Module | None, files_from: str | Path | None, dtype: torch.dtype) -> None:
    for path in sorted(Path(files_from).iterdir()) if files_from is not None else ():
        if path.is_file() and any(fnmatchcase(path.name, pattern) for pattern in COPIED):
            shutil.copyfile(path, work / path.name)
    config = _config(model)
    if config is not None:
        config.save_pretrained(work)
        generation = getattr(model, "generation_config", None)
        if generation is not None and hasattr(generation, "save_pretrained"):
            generation.save_pretrained(work)
    data = json.loads((work / CONFIG).read_text())
    if config is not None:
        data["architectures"] = [type(model).__name__]
    for key in ("dtype", "torch_dtype"):
        if key in data or key == "dtype":
            data[key] = str(dtype).removeprefix("torch.")
    (work / CONFIG).write_text(json.dumps(data, indent=2) + "\n")


def _agree(wire: Wire | None, goal: Path, error: BaseException | None) -> None:
    """Raise on all ranks if one failed."""
    failed = [] if wire is None else wire.every(torch.tensor([int(error is not None)])).flatten().nonzero().flatten().tolist()
    if error is not None:
        raise error if isinstance(error, ScrimpError) else CheckpointError(f"{goal} could not be written: {error}") from error
    if failed:
        raise CheckpointError(f"{goal} could not be written: rank {failed[0]} failed; see the error there")
