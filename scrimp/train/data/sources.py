"""Opens the data that [data] names: text files, files of tokens, a dataset folder, a function."""

from __future__ import annotations

import glob
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from scrimp.errors import ScrimpError
from scrimp.train.config.sections import TOKEN_DTYPES, DataSection
from scrimp.train.data.stream import Sequences, Stream, Tokens
from scrimp.train.data.tokenizers import Tokenizer, tokenizer_of
from scrimp.train.model.build import called

IDS, TEXT = "input_ids", "text"


class Samples(Protocol):
    """A map-style dataset: a sample is a tuple or a dict of tensors."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int, /) -> Any: ...


def open_data(data: DataSection, tokenizer: str, seq: int | None, vocab: int | None, *, shifted: bool) -> Samples:
    """`seq`: tokens of a sequence, `vocab`: tokens that the model knows, None where that is unknown. `shifted`: samples are
    (inputs, targets); otherwise {input_ids, labels}, which the model shifts itself."""
    if data.function is not None:
        return _by_function(data.function)
    if seq is None:
        raise ScrimpError(
            "[data] seq is not set, and the model does not say how long its sequences are: set it, such as seq = 1024"
        )
    reader = None
    if data.text or data.dataset is not None:
        reader = tokenizer_of(tokenizer)
        if vocab is not None and data.text and reader.size > vocab:
            raise ScrimpError(
                f"the tokenizer has {reader.size} tokens, and the model's vocabulary {vocab}: set it to {reader.size} or more in "
                "[model.settings] (vocab of the zoo, vocab_size of a config.json)"
            )
    if data.text:
        assert reader is not None
        files = _files("text", data.text)
        stream = Stream([array for path in files for array in reader.file(path)])
        what = f"{len(files)} text file{'s' if len(files) > 1 else ''}"
    elif data.tokens:
        files = _files("tokens", data.tokens)
        stream = Stream([_mapped(path, data.dtype, vocab) for path in files])
        what = f"{len(files)} file{'s' if len(files) > 1 else ''} of tokens"
    else:
        assert data.dataset is not None
        assert reader is not None
        stream, what = _dataset(data, reader), f"the dataset {data.dataset}"
    samples = Sequences(stream, seq, shifted=shifted)
    if not len(samples):
        raise ScrimpError(
            f"[data]: {len(stream)} tokens in {what}, and a sequence is {seq + shifted}: give more data, or a smaller seq"
        )
    return samples


def _files(key: str, patterns: Sequence[str]) -> list[Path]:
    found: list[Path] = []
    for pattern in patterns:
        here = [Path(name) for name in sorted(glob.glob(pattern, recursive=True)) if Path(name).is_file()]
        if not here:
            raise ScrimpError(f"[data] {key}: there is no file {pattern}")
        found += [path for path in here if path not in found]
    return found


def _mapped(path: Path, dtype: str | None, vocab: int | None) -> Tokens:
    """A file of tokens, mapped. A .bin file has no header: its dtype is in a JSON file beside it, or in [data] dtype."""
    if path.suffix == ".npy":
        try:
            array = np.load(path, mmap_mode="r", allow_pickle=False)
        except (ValueError, OSError) as error:
            raise ScrimpError(f"{path} is no .npy file: {error}") from error
        if array.ndim != 1 or array.dtype.kind not in "ui":
            raise ScrimpError(f"{path} has {array.dtype} of shape {array.shape}: a file of tokens has whole numbers in one dim")
        return array  # type: ignore[no-any-return]
    if path.suffix != ".bin":
        raise ScrimpError(f"{path}: a file of tokens ends in .npy or .bin; text files go to [data] text")
    beside = path.with_suffix(".json")
    about = _sidecar(beside) if beside.exists() else {}
    name = about.get("dtype", dtype)
    if name is None:
        raise ScrimpError(
            f"{path} has no header: set [data] dtype, one of {', '.join(TOKEN_DTYPES)}, or write {beside.name}, such as "
            '{"dtype": "uint16"}'
        )
    if name not in TOKEN_DTYPES:
        raise ScrimpError(f"{beside}: dtype is {name!r}; it must be one of {', '.join(TOKEN_DTYPES)}")
    if dtype is not None and name != dtype:
        raise ScrimpError(f"{path}: [data] dtype is '{dtype}', and {beside.name} says '{name}'; leave out one of them")
    if vocab is not None and isinstance(about.get("vocab"), int) and about["vocab"] > vocab:
        raise ScrimpError(f"{beside}: vocab is {about['vocab']}, and the model's vocabulary {vocab}: set it in [model.settings]")
    kind, nbytes = np.dtype(name), path.stat().st_size
    if nbytes % kind.itemsize:
        raise ScrimpError(f"{path} has {nbytes} bytes, which is no multiple of the {kind.itemsize} bytes of {name}")
    return np.memmap(path, dtype=kind.newbyteorder("<"), mode="r") if nbytes else np.empty(0, dtype=kind)


def _sidecar(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ScrimpError(f"{path} cannot be read: {error}") from error
    if not isinstance(data, dict):
        raise ScrimpError(f'{path} holds a {type(data).__name__}; it must be an object, such as {{"dtype": "uint16"}}')
    return data


def _dataset(data: DataSection, tokenizer: Tokenizer) -> Stream:
    try:
        from datasets import DatasetDict, load_from_disk  # type: ignore[import-untyped, unused-ignore]
    except ImportError as error:
        raise ScrimpError(f"[data] dataset: to read it, pip install datasets ({error})") from error
    try:
        found = load_from_disk(data.dataset)
    except Exception as error:  # datasets raises many kinds of errors
        raise ScrimpError(f"[data] dataset: {data.dataset} is no folder of save_to_disk: {error}") from error
    if isinstance(found, DatasetDict):
        if data.split is None or data.split not in found:
            raise ScrimpError(f"[data] split is {data.split!r}; {data.dataset} has the splits {', '.join(found)}")
        found = found[data.split]
    elif data.split is not None:
        raise ScrimpError(f"[data] split is '{data.split}', and {data.dataset} has no splits: leave it out")
    column = data.column or next((name for name in (IDS, TEXT) if name in found.column_names), None)
    if column not in found.column_names:
        raise ScrimpError(f"[data] column is {data.column!r}; {data.dataset} has the columns {', '.join(found.column_names)}")
    rows = found[column]
    return Stream([tokenizer.text(row) if isinstance(row, str) else np.asarray(row, dtype=np.uint32) for row in rows])


def _by_function(name: str) -> Samples:
    made = called(name, "that returns a dataset")
    if not (hasattr(made, "__len__") and hasattr(made, "__getitem__")):
        raise ScrimpError(f"{name}() returned a {type(made).__name__}; it must return a dataset with len() and [k]")
    if not len(made):
        raise ScrimpError(f"{name}() returned a dataset without samples")
    return made  # type: ignore[no-any-return]
