"""A stream of tokens in several arrays, and the sequences in it. Arrays may be mapped files: only what is read is in memory."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Tokens = npt.NDArray[Any]


class Stream:
    """Arrays of whole numbers, one after the other."""

    def __init__(self, arrays: Sequence[Tokens]) -> None:
        self._arrays = [array for array in arrays if len(array)]
        self._starts = [0, *accumulate(len(array) for array in self._arrays)]

    def __len__(self) -> int:
        return self._starts[-1]

    def read(self, start: int, stop: int) -> Tokens:
        """Tokens [start, stop) as int64."""
        found, at = np.empty(stop - start, dtype=np.int64), start
        number = bisect_right(self._starts, start) - 1
        while at < stop:
            array, first = self._arrays[number], self._starts[number]
            end = min(stop, first + len(array))
            found[at - start : end - start] = array[at - first : end - first]
            at, number = end, number + 1
        return found


class Sequences:
    """Samples of `seq` tokens, without overlap. `shifted`: with the tokens that follow each, as (inputs, targets)."""

    def __init__(self, stream: Stream, seq: int, *, shifted: bool) -> None:
        self._stream, self._seq, self._shifted = stream, seq, shifted

    def __len__(self) -> int:
        return max(0, len(self._stream) - self._shifted) // self._seq

    def __getitem__(self, number: int) -> Any:
        start = number * self._seq
        tokens = torch.from_numpy(self._stream.read(start, start + self._seq + self._shifted))
        if self._shifted:
            return tokens[:-1], tokens[1:]
        return {"input_ids": tokens, "labels": tokens}
