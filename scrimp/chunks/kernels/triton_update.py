# mypy: ignore-errors
"""Updates on a device, in Triton: gradient, master and states in, master, states and 16-bit weight out, in one pass.

AdamW's arithmetic is torch's (fused_adam_utils.cuh), all of it in fp32: settings rounded to fp32, moments by two fused
multiply-adds, weight decay by one (nvcc contracts it), divisions and roots rounded correctly. Nothing else here could be
contracted. The bias corrections come as numbers on the device, since torch raises the betas to a power there, in fp32.
SGD's is torch's too (FusedSgdKernel.cu): in fp32, every sum with a product in it by a fused multiply-add, as nvcc contracts
it. Moments of 8 bits are decoded before AdamW's arithmetic, and encoded after it (`kernels/triton_codec.py`).

Only `kernels/device_update.py` imports this file, because Triton is optional. Its annotations are Triton's types, not text, and
say that numbers which change from step to step are not compiled in.
"""

import triton
import triton.language as tl

from scrimp.chunks.kernels.triton_codec import decode, decode_unsigned, encode, encode_unsigned, hashed, scales_of


@triton.jit(do_not_specialize=["numel", "scale", "corrections"])
def adamw(
    master,
    m,
    v,
    gradient,
    weight,
    scale,
    corrections,
    numel: tl.int64,
    lr: tl.float32,
    beta1: tl.float32,
    beta2: tl.float32,
    eps: tl.float32,
    decay: tl.float32,
    own_master: tl.constexpr,
    block: tl.constexpr,
):
    start = tl.program_id(0).to(tl.int64) * block
    at = start + tl.arange(0, block)
    if start + block <= numel:  # without a mask loads and stores have full width
        _adamw(master, m, v, gradient, weight, scale, corrections, lr, beta1, beta2, eps, decay, own_master, at, None)
    else:
        _adamw(master, m, v, gradient, weight, scale, corrections, lr, beta1, beta2, eps, decay, own_master, at, at < numel)


@triton.jit
def _adamw(master, m, v, gradient, weight, scale, corrections, lr, beta1, beta2, eps, decay, own_master: tl.constexpr, at, mask):
    g = tl.load(gradient + at, mask).to(tl.float32) * tl.load(scale)
    p, first, second = tl.load(master + at, mask), tl.load(m + at, mask), tl.load(v + at, mask)
    p, first, second = _adamw_of(p, first, second, g, corrections, lr, beta1, beta2, eps, decay)
    tl.store(m + at, first, mask)
    tl.store(v + at, second, mask)
    tl.store(master + at, p, mask)
    if not own_master:
        tl.store(weight + at, p.to(weight.dtype.element_ty), mask)


@triton.jit
def _adamw_of(p, first, second, g, corrections, lr, beta1, beta2, eps, decay):
    p = tl.fma(-(lr * decay), p, p)
    first = tl.fma(beta1, first, tl.fma(-beta1, g, g))
    square = g * g
    second = tl.fma(beta2, second, tl.fma(-beta2, square, square))
    step_size = tl.div_rn(lr, tl.load(corrections))
    p -= tl.div_rn(step_size * first, tl.div_rn(tl.sqrt_rn(second), tl.load(corrections + 1)) + eps)
    return p, first, second


@triton.jit(do_not_specialize=["numel", "seed", "scales", "square_scales", "scale", "corrections"])
def adamw_coded(
    master,
    codes,
    scales,
    square_codes,
    square_scales,
    gradient,
    weight,
    scale,
    corrections,
    numel: tl.int64,
    seed: tl.int64,
    lr: tl.float32,
    beta1: tl.float32,
    beta2: tl.float32,
    eps: tl.float32,
    decay: tl.float32,
    own_master: tl.constexpr,
    coded: tl.constexpr,
    block: tl.constexpr,
):
    """`coded` elements share a scale, and are a row here; `seed` is the hash input of the first element."""
    start = tl.program_id(0).to(tl.int64) * block
    row = tl.arange(0, block // coded)[:, None]
    at = start + (row * coded + tl.arange(0, coded)[None, :])
    row = start // coded + row
    if start + block <= numel:
        _adamw_coded(
            master, codes, scales, square_codes, square_scales, gradient, weight, scale, corrections, seed,
            lr, beta1, beta2, eps, decay, own_master, at, row, None, None,
        )  # fmt: skip
    else:
        _adamw_coded(
            master, codes, scales, square_codes, square_scales, gradient, weight, scale, corrections, seed,
            lr, beta1, beta2, eps, decay, own_master, at, row, at < numel, row * coded < numel,
        )  # fmt: skip


@triton.jit
def _adamw_coded(
    master, codes, scales, square_codes, square_scales, gradient, weight, scale, corrections, seed,
    lr, beta1, beta2, eps, decay, own_master: tl.constexpr, at, row, mask, row_mask,
):  # fmt: skip
    g = tl.load(gradient + at, mask).to(tl.float32) * tl.load(scale)
    first = decode(tl.load(codes + at, mask), tl.load(scales + row, row_mask))
    second = decode_unsigned(tl.load(square_codes + at, mask), tl.load(square_scales + row, row_mask))
    p, first, second = _adamw_of(tl.load(master + at, mask), first, second, g, corrections, lr, beta1, beta2, eps, decay)
    tl.store(master + at, p, mask)
    if not own_master:
        tl.store(weight + at, p.to(weight.dtype.element_ty), mask)
    if mask is not None:  # the incomplete last block of a parameter: missing elements count as 0
        first, second = tl.where(mask, first, 0.0), tl.where(mask, second, 0.0)
    scale_1, scale_2 = scales_of(first), scales_of(second)
    random = hashed((seed + at).to(tl.uint32))
    tl.store(scales + row, scale_1, row_mask)
    tl.store(square_scales + row, scale_2, row_mask)
    tl.store(codes + at, encode(first, scale_1, random), mask)
    tl.store(square_codes + at, encode_unsigned(second, scale_2, random), mask)


@triton.jit(do_not_specialize=["numel", "scale"])
def sgd(
    master,
    buffer,
    gradient,
    weight,
    scale,
    numel: tl.int64,
    lr: tl.float32,
    momentum: tl.float32,
    carry: tl.float32,
    take: tl.float32,
    decay: tl.float32,
    buffered: tl.constexpr,
    nesterov: tl.constexpr,
    own_master: tl.constexpr,
    block: tl.constexpr,
):
    """The buffer becomes `carry` times itself and `take` times the gradient: 0 and 1 in a parameter's first update."""
    start = tl.program_id(0).to(tl.int64) * block
    at = start + tl.arange(0, block)
    if start + block <= numel:
        _sgd(
            master, buffer, gradient, weight, scale, lr, momentum, carry, take, decay,
            buffered, nesterov, own_master, at, None,
        )  # fmt: skip
    else:
        _sgd(
            master, buffer, gradient, weight, scale, lr, momentum, carry, take, decay,
            buffered, nesterov, own_master, at, at < numel,
        )  # fmt: skip


@triton.jit
def _sgd(
    master, buffer, gradient, weight, scale, lr, momentum, carry, take, decay,
    buffered: tl.constexpr, nesterov: tl.constexpr, own_master: tl.constexpr, at, mask,
):  # fmt: skip
    g = tl.load(gradient + at, mask).to(tl.float32) * tl.load(scale)
    p = tl.load(master + at, mask)
    g = tl.fma(p, decay, g)
    if buffered:
        kept = tl.fma(take, g, tl.load(buffer + at, mask) * carry)
        tl.store(buffer + at, kept, mask)
        if nesterov:
            g = tl.fma(kept, momentum, g)
        else:
            g = kept
    p = tl.fma(-lr, g, p)
    tl.store(master + at, p, mask)
    if not own_master:
        tl.store(weight + at, p.to(weight.dtype.element_ty), mask)
