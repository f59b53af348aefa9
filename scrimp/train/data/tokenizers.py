"""Tokenizers: bytes, which is built in, or a folder of Hugging Face's."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from scrimp.errors import ScrimpError
from scrimp.train.config.sections import BYTES
from scrimp.train.data.stream import Tokens

END = 0  # ends a file; no text has this byte


class Tokenizer(Protocol):
    """`size`: of the vocabulary."""

    @property
    def size(self) -> int: ...

    def file(self, path: Path) -> list[Tokens]:
        """The tokens of a text file, with one that ends it."""

    def text(self, text: str) -> Tokens: ...


class ByteTokenizer:
    """A token is a byte of UTF-8; the byte 0 ends a text. A file is mapped, not read."""

    size = 256

    def file(self, path: Path) -> list[Tokens]:
        if path.stat().st_size == 0:
            return []
        return [np.memmap(path, dtype=np.uint8, mode="r"), np.array([END], dtype=np.uint8)]

    def text(self, text: str) -> Tokens:
        return np.frombuffer(text.encode() + bytes([END]), dtype=np.uint8)


@dataclass(frozen=True)
class HuggingFaceTokenizer:
    """Its end token, if it has one, ends a text."""

    inner: Any

    @property
    def size(self) -> int:
        return len(self.inner)

    def file(self, path: Path) -> list[Tokens]:
        try:
            return [self.text(path.read_text(encoding="utf-8"))]
        except UnicodeDecodeError as error:
            raise ScrimpError(f"{path} is not a text in UTF-8: {error}") from error

    def text(self, text: str) -> Tokens:
        end = self.inner.eos_token_id
        ids = self.inner(text, add_special_tokens=False, verbose=False)["input_ids"]
        return np.asarray([*ids, *([] if end is None else [end])], dtype=np.uint32)


def tokenizer_of(name: str) -> Tokenizer:
    if name == BYTES:
        return ByteTokenizer()
    if not Path(name).is_dir():
        raise ScrimpError(f"[tokenizer] name is '{name}': give '{BYTES}', or a folder of a Hugging Face tokenizer")
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ScrimpError(f"[tokenizer] name is a folder: to read it, pip install transformers ({error})") from error
    try:
        return HuggingFaceTokenizer(AutoTokenizer.from_pretrained(name))
    except Exception as error:  # transformers raises many kinds of errors
        raise ScrimpError(f"[tokenizer] {name} is no tokenizer of Hugging Face: {str(error).partition(chr(10))[0]}") from error
