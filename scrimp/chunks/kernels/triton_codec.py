# mypy: ignore-errors
"""8-bit moments in Triton; `tables/state_codec.py` documents the codes. It uses only integers, single products and one correctly
rounded division, so equal moments have equal codes on device and host.

A program handles some blocks, one in each row. Only `kernels/triton_update.py` imports this file, because Triton is optional.
"""

import triton
import triton.language as tl

from scrimp.chunks.tables import state_codec

SHIFT = tl.constexpr(state_codec.SHIFT)
MAGNITUDE = tl.constexpr(state_codec.MAGNITUDE)
SMALLEST = tl.constexpr(state_codec.SMALLEST)
DITHER = tl.constexpr(state_codec.DITHER)
FIRST, SECOND = tl.constexpr(state_codec.FIRST), tl.constexpr(state_codec.SECOND)
BELOW_FIRST, BELOW_SECOND = tl.constexpr(state_codec.ONE - state_codec.FIRST), tl.constexpr(state_codec.ONE - state_codec.SECOND)
MIX_1, MIX_2 = tl.constexpr(state_codec.MIX_1), tl.constexpr(state_codec.MIX_2)


@triton.jit
def decode(codes, scales):
    """First moments from codes."""
    codes = codes.to(tl.int32)
    relative = ((tl.abs(codes) + BELOW_FIRST) << SHIFT).to(tl.float32, bitcast=True)
    relative = tl.where(codes == 0, 0.0, relative)
    return tl.where(codes < 0, -relative, relative) * scales


@triton.jit
def decode_unsigned(codes, scales):
    """Second moments from codes."""
    return ((codes.to(tl.int32) + BELOW_SECOND) << SHIFT).to(tl.float32, bitcast=True) * scales


@triton.jit
def scales_of(moments):
    """The scale of each row."""
    largest = tl.max(moments.to(tl.int32, bitcast=True) & MAGNITUDE, axis=1, keep_dims=True)
    return tl.maximum(largest, SMALLEST).to(tl.float32, bitcast=True)


@triton.jit
def encode(moments, scales, random):
    """Codes of first moments; `random` has 32 bits for each, of which the second moments use the other 16."""
    relative = (moments * _inverse(scales)).to(tl.int32, bitcast=True)
    codes = _code(relative, (random << 4) & DITHER, BELOW_FIRST, FIRST)
    return tl.where(relative < 0, -codes, codes).to(tl.int8)


@triton.jit
def encode_unsigned(moments, scales, random):
    relative = (moments * _inverse(scales)).to(tl.int32, bitcast=True)
    return _code(relative, (random >> 12) & DITHER, BELOW_SECOND, SECOND).to(tl.uint8)


@triton.jit
def hashed(x):
    """Hashes each 32-bit number to 32 random bits."""
    x = (x ^ (x >> 16)) * MIX_1
    x = (x ^ (x >> 15)) * MIX_2
    return x ^ (x >> 16)


@triton.jit
def _inverse(scales):
    return tl.div_rn(tl.full(scales.shape, 1.0, tl.float32), scales)


@triton.jit
def _code(relative, dither, below: tl.constexpr, largest: tl.constexpr):
    codes = (((relative & MAGNITUDE) + dither.to(tl.int32)) >> SHIFT) - below
    return tl.minimum(tl.maximum(codes, 0), largest)
