"""Storage formats of optimizer states: as they are ("fp32"), or as 8-bit numbers with an fp32 scale for each block ("int8").

The scale of a block of 64 elements is its largest magnitude. An element is stored as a small float with 3 mantissa bits relative
to the scale. Written as bits of fp32, the code is the top part:

    first moment    sign and 7 bits: 0, and 2^-16 .. 1 of the scale; smaller ones become 0
    second moment   8 bits: 2^-32 .. 1 of the scale, and never 0, so that no update is divided by a moment that was lost

Both are rounded stochastically, so that they are right in the mean: a second moment changes by a thousandth in a step, far less
than its last bit, and would never change if it were rounded to nearest. The random bits are a hash of the element's index in its
parameter and of the parameter's update count, so equal runs have equal bits on every tier.

Blocks are as long as the table's alignment: no chunk, shard or tile ever cuts one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from scrimp.chunks.tables.table import ALIGN
from scrimp.errors import RunError

CODECS = ("fp32", "int8")

BLOCK = ALIGN
SHIFT = 20  # bits of fp32 below a code: 3 of the 23 mantissa bits stay
ONE = 0x3F800000 >> SHIFT  # the bits of 1.0, which is the largest code
FIRST, SECOND = 127, 255  # largest codes
MAGNITUDE = 0x7FFFFFFF
SMALLEST = 0x00800000  # bits of the least scale, whose inverse is finite
DITHER = 0xFFFF0  # 16 random bits in place of the bits that a code cuts off; the other 16 of a hash serve the other moment
GOLDEN, MIX_1, MIX_2 = 0x9E3779B9, 0x7FEB352D, 0x846CA68B

ROWS = 4  # fp32 scratch numbers that a coder needs per element of its tile, and one more per block


@dataclass(frozen=True, kw_only=True)
class Field:
    """One tensor of a layer's states: one item for every `every` elements."""

    dtype: torch.dtype
    every: int = 1

    def numel(self, elements: int) -> int:
        return -(-elements // self.every)

    def nbytes(self, elements: int) -> int:
        return self.numel(elements) * self.dtype.itemsize

    def span(self, elements: slice) -> slice:
        """The items of some elements. They must start with an item, and end with one or with the parameter."""
        return slice(elements.start // self.every, self.numel(elements.stop))


_SCALES = Field(dtype=torch.float32, every=BLOCK)


def state_fields(states: int, codec: str) -> tuple[Field, ...]:
    """The tensors that store so many states. In int8 these are codes and scales of two moments."""
    if codec == "fp32":
        return (Field(dtype=torch.float32),) * states
    if codec == "int8" and states == 2:
        return Field(dtype=torch.int8), _SCALES, Field(dtype=torch.uint8), _SCALES
    raise RunError(f"optimizer states as {codec!r} are not possible; there are {' and '.join(map(repr, CODECS))}")


def padded(elements: int) -> int:
    return -(-elements // BLOCK) * BLOCK


def coder_numel(tile: int) -> int:
    return ROWS * padded(tile) + padded(tile) // BLOCK


class Coder:
    """Decodes and encodes moments tile by tile, in the scratch `stage`: `coder_numel` fp32 numbers for the largest tile."""

    def __init__(self, stage: torch.Tensor) -> None:
        self.stage = stage

    def decode(self, states: Sequence[torch.Tensor], span: slice) -> list[torch.Tensor]:
        """Both moments of some elements, to be changed in place before `encode` writes them back."""
        first, second, work, _, _ = self._rows(span)
        numel = span.stop - span.start
        codes, scales, unsigned, square_scales = _cut(states, span)
        work[:numel].copy_(codes).sign_()
        _bits(first)[:numel].copy_(codes).abs_().add_(ONE - FIRST).bitwise_left_shift_(SHIFT)
        first[:numel].mul_(work[:numel])
        _bits(second)[:numel].copy_(unsigned).add_(ONE - SECOND).bitwise_left_shift_(SHIFT)
        for row, of_block in ((first, scales), (second, square_scales)):
            row[numel:].zero_()
            _by_block(row).mul_(of_block[:, None])
        return self.moments(span)

    def moments(self, span: slice) -> list[torch.Tensor]:
        """The decoded moments between `decode` and `encode`."""
        return [row[: span.stop - span.start] for row in self._rows(span)[:2]]

    def encode(self, states: Sequence[torch.Tensor], span: slice, *, place: int, count: int) -> None:
        """`place`: index of the span's first element in its parameter; `count`: update count of the parameter."""
        first, second, work, random, inverse = self._rows(span)
        numel = span.stop - span.start
        codes, scales, unsigned, square_scales = _cut(states, span)
        _hash(_bits(random), _bits(work), seed(place, count))
        for row, of_block in ((first, scales), (second, square_scales)):
            row[numel:].zero_()
            magnitude = torch.bitwise_and(_bits(row), MAGNITUDE, out=_bits(work))
            torch.amax(_by_block(magnitude), 1, out=_bits(of_block)).clamp_(min=SMALLEST)
            _by_block(row).mul_(torch.reciprocal(of_block, out=inverse)[:, None])
        dither = torch.bitwise_right_shift(_bits(random), 12, out=_bits(work)).bitwise_and_(DITHER)
        unsigned.copy_(_code(_bits(second), dither, SECOND)[:numel])
        sign = torch.bitwise_right_shift(_bits(first), 31, out=_bits(work)).bitwise_or_(1)
        dither = _bits(random).bitwise_left_shift_(4).bitwise_and_(DITHER)
        codes.copy_(_code(_bits(first), dither, FIRST).mul_(sign)[:numel])

    def _rows(self, span: slice) -> tuple[torch.Tensor, ...]:
        numel = padded(span.stop - span.start)
        rows = self.stage[: ROWS * numel].view(ROWS, numel)
        return (*rows.unbind(), self.stage[ROWS * numel : ROWS * numel + numel // BLOCK])


def seed(place: int, count: int) -> int:
    """The 32-bit hash input of an element; that of the next element is one more."""
    return (place + count * GOLDEN) & 0xFFFFFFFF


def _hash(row: torch.Tensor, work: torch.Tensor, start: int) -> None:
    """32 random bits for each element."""
    torch.arange(row.numel(), out=row)
    row.add_(_signed(start))
    for shift, factor in ((16, MIX_1), (15, MIX_2), (16, 1)):
        torch.bitwise_right_shift(row, shift, out=work).bitwise_and_((1 << (32 - shift)) - 1)
        row.bitwise_xor_(work).mul_(_signed(factor))


def _code(bits: torch.Tensor, dither: torch.Tensor, largest: int) -> torch.Tensor:
    """In place: from magnitudes relative to their scale, as bits of fp32, to codes."""
    return bits.bitwise_and_(MAGNITUDE).add_(dither).bitwise_right_shift_(SHIFT).sub_(ONE - largest).clamp_(0, largest)


def _cut(states: Sequence[torch.Tensor], span: slice) -> list[torch.Tensor]:
    return [state[field.span(span)] for state, field in zip(states, state_fields(2, "int8"), strict=True)]


def _bits(row: torch.Tensor) -> torch.Tensor:
    return row.view(torch.int32)


def _by_block(row: torch.Tensor) -> torch.Tensor:
    return row.view(-1, BLOCK)


def _signed(number: int) -> int:
    """The 32 bits as a signed number for torch's int32."""
    return number - (1 << 32) if number >> 31 else number
