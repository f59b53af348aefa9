# mypy: ignore-errors
"""Selecting, sending and applying on a device, in Triton; `_select.py`, `_packet.py` and `_bucket.py` define the results.

The bits of a magnitude, without the sign, are ordered as the magnitudes. So a radix search finds the smallest magnitude that is
sent, digit by digit from the highest bits: a pass counts how often each digit occurs among the candidates, which agree in the
digits before. The next pass first finds the digit at which the count from the top reaches the number wanted. Four passes find
all 31 bits, whatever the numbers are. Several programs share a row, each with its own chunk and counts. The counts also give the
number of entries from earlier chunks, so the last pass, which sends, knows where in the packet to write. Among equal magnitudes
the first are sent.

Only `_select_fused.py` imports this file, because Triton is optional.
"""

import triton
import triton.language as tl

SPLITS = tl.constexpr(8)  # chunks of a row
BINS = tl.constexpr(256)  # values of a digit
STATE = tl.constexpr(2 * SPLITS.value)  # numbers kept for a row: digits so far, entries wanted, larger ones of each chunk
FEW = tl.constexpr(8)  # if less than one in so many of a chunk is a candidate, they are added one by one, which is faster
COUNTED = tl.constexpr(2048)  # elements that are counted together
STEP = tl.constexpr(1024)  # elements that are sent together: more would not fit the registers
MAGNITUDE = tl.constexpr(0x7FFFFFFF)


@triton.jit(do_not_specialize=["numel", "per_row", "from_rest"])
def count(
    values,
    counts_before,
    state_before,
    counts,
    state,
    numel: tl.int64,
    per_row: tl.int32,
    from_rest: tl.int32,
    width_before: tl.constexpr,
    shift: tl.constexpr,
    width: tl.constexpr,
    columns: tl.constexpr,
):
    """Counts how often each digit, of `width` bits from bit `shift`, occurs among the candidates. `width_before`: width of the
    digit counted before, 0 if none was."""
    block: tl.constexpr = columns // SPLITS
    row, split = tl.program_id(0) // SPLITS, tl.program_id(0) % SPLITS
    chunk = tl.arange(0, SPLITS)
    start = row.to(tl.int64) * columns
    length = tl.minimum(numel - start, columns).to(tl.int32)
    into = counts + (row * SPLITS + split) * BINS
    if width_before:
        prefix, wanted, larger, equal = _narrowed(counts_before, state_before, row, width_before)
        mine = tl.sum(tl.where(chunk == split, equal, 0), axis=0)
        if mine * FEW < block:
            _count_few(values + start, into, mine, prefix, split, length, shift, width, block)
        else:
            _count_many(values + start, into, prefix, split, length, shift, width, block)
    else:
        wanted = tl.where(length == columns, per_row, from_rest)
        prefix, larger = wanted * 0, tl.zeros((SPLITS,), tl.int32)
        _count_many(values + start, into, prefix, split, length, shift, width, block)
    if split == 0:
        tl.store(state + row * STATE, prefix)
        tl.store(state + row * STATE + 1, wanted)
        tl.store(state + row * STATE + SPLITS + chunk, larger)


@triton.jit
def _count_many(values, into, prefix, split, length, shift: tl.constexpr, width: tl.constexpr, block: tl.constexpr):
    found = tl.zeros((BINS,), tl.int32)
    for turn in range(block // COUNTED):
        asked, digit = _digits(values, prefix, split * block + turn * COUNTED, length, shift, width)
        found += tl.histogram(digit, BINS, mask=asked)
    tl.store(into + tl.arange(0, BINS), found)


@triton.jit
def _count_few(values, into, mine, prefix, split, length, shift: tl.constexpr, width: tl.constexpr, block: tl.constexpr):
    tl.store(into + tl.arange(0, BINS), tl.zeros((BINS,), tl.int32))
    tl.debug_barrier()  # all counts are zero before any is increased
    if mine > 0:
        for turn in range(block // COUNTED):
            asked, digit = _digits(values, prefix, split * block + turn * COUNTED, length, shift, width)
            tl.atomic_add(into + digit, 1, asked, sem="relaxed")


@triton.jit
def _digits(values, prefix, first, length, shift: tl.constexpr, width: tl.constexpr):
    """Which elements are candidates, and the digit of each."""
    place = first + tl.arange(0, COUNTED)
    bits = _loaded(values, place, first + COUNTED, length).to(tl.int32, bitcast=True) & MAGNITUDE
    return (place < length) & ((bits >> (shift + width)) == prefix), (bits >> shift) & ((1 << width) - 1)


@triton.jit(do_not_specialize=["momentum", "places", "sent", "numel", "per_row"])
def send(
    values,
    momentum,
    places,
    sent,
    counts,
    state,
    numel: tl.int64,
    per_row: tl.int32,
    limit: tl.float32,
    masking: tl.constexpr,
    width: tl.constexpr,
    columns: tl.constexpr,
):
    """Writes what is sent into the packet, in order of position; rounding errors stay, and the momentum there is cleared."""
    block: tl.constexpr = columns // SPLITS
    row, split = tl.program_id(0) // SPLITS, tl.program_id(0) % SPLITS
    start = row.to(tl.int64) * columns
    length = tl.minimum(numel - start, columns).to(tl.int32)
    if split * block >= length:
        return
    least, wanted, larger, equal = _narrowed(counts, state, row, width)
    earlier = tl.arange(0, SPLITS) < split
    larger_before = tl.sum(tl.where(earlier, larger, 0), axis=0)
    equal_before = tl.sum(tl.where(earlier, equal, 0), axis=0)
    packed = row.to(tl.int64) * per_row
    for turn in range(block // STEP):
        first = split * block + turn * STEP
        place = first + tl.arange(0, STEP)
        x = _loaded(values + start, place, first + STEP, length)
        bits = x.to(tl.int32, bitcast=True) & MAGNITUDE
        is_larger = (place < length) & (bits > least)
        is_equal = (place < length) & (bits == least)
        both = is_larger.to(tl.int32) + (is_equal.to(tl.int32) << 16)  # one running sum of two: a chunk has fewer than 2^16
        before = tl.cumsum(both, axis=0) - both
        equals = equal_before + (before >> 16)
        taken = is_larger | (is_equal & (equals < wanted))
        at = larger_before + (before & 0xFFFF) + tl.minimum(equals, wanted)
        travels, as_number = _rounded(tl.minimum(tl.maximum(x, -limit), limit), sent.dtype.element_ty)
        tl.store(places + packed + at, place.to(tl.int16), taken)
        tl.store(sent + packed + at, travels, taken)
        tl.store(values + start + place, x - as_number, taken)
        if masking:
            tl.store(momentum + start + place, tl.zeros((STEP,), tl.float32), taken)
        more = tl.sum(both, axis=0)
        larger_before += more & 0xFFFF
        equal_before += more >> 16


@triton.jit
def _narrowed(counts, state, row, width: tl.constexpr):
    """One digit more than `state` has: digits so far, how many of the candidates are wanted, and for each chunk how many are
    larger, and how many are candidates."""
    chunk, digits = tl.arange(0, SPLITS), tl.arange(0, BINS)
    there = tl.load(counts + (row * SPLITS + chunk[:, None]) * BINS + digits[None, :])
    prefix, wanted = tl.load(state + row * STATE), tl.load(state + row * STATE + 1)
    larger = tl.load(state + row * STATE + SPLITS + chunk)
    total = tl.sum(there, axis=0)
    from_top = tl.cumsum(total, axis=0, reverse=True)
    here = (from_top >= wanted) & (from_top - total < wanted)
    digit = tl.sum(tl.where(here, digits, 0), axis=0)
    wanted -= tl.sum(tl.where(here, from_top - total, 0), axis=0)
    larger += tl.sum(tl.where(digits[None, :] > digit, there, 0), axis=1)
    equal = tl.sum(tl.where(digits[None, :] == digit, there, 0), axis=1)
    return (prefix << width) | digit, wanted, larger, equal


@triton.jit
def _loaded(values, place, stop, length):
    if stop <= length:  # without a mask loads have full width
        x = tl.load(values + place)
    else:
        x = tl.load(values + place, place < length, other=0.0)
    return x


@triton.jit
def _rounded(x, dtype: tl.constexpr):
    """A value as it is sent, and in fp32. bf16 is rounded by integer arithmetic, to nearest even, as the hardware does but not
    every interpreter. `x` is finite, and within the range of the type."""
    if dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        travels = bits.to(tl.int16).to(tl.bfloat16, bitcast=True)
        as_number = (bits << 16).to(tl.float32, bitcast=True)
    else:
        travels = x.to(dtype)
        as_number = travels.to(tl.float32)
    return travels, as_number


@triton.jit(do_not_specialize=["places", "sent", "wrong", "numel", "per_row", "entries"])
def apply(
    places,
    sent,
    into,
    weight,
    wrong,
    numel: tl.int64,
    per_row: tl.int64,
    entries: tl.int64,
    share: tl.float32,
    written: tl.constexpr,
    told: tl.constexpr,
    columns: tl.constexpr,
    block: tl.constexpr,
):
    """Applies one rank's packet, in which no position occurs twice. A position out of range is skipped, and reported in `wrong`
    if `told`; changed entries are also written to the weight if `written`."""
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    there = at < entries
    place = tl.load(places + at, there, other=0).to(tl.int32) & 0xFFFF
    position = tl.minimum(at // per_row, numel // columns) * columns + place
    inside = there & (position < numel)
    value = tl.load(sent + at, inside, other=0.0).to(tl.float32)
    sum = tl.load(into + position, inside, other=0.0) + value * share
    tl.store(into + position, sum, inside)
    if written:
        tl.store(weight + position, sum.to(weight.dtype.element_ty), inside)
    if told:
        tl.store(wrong + place * 0, tl.full((block,), 1, tl.int32), there & (position >= numel))


@triton.jit(do_not_specialize=["numel"])
def accumulate(
    gradient,
    momentum,
    residual,
    sound,
    numel: tl.int64,
    carry: tl.float32,
    rate: tl.float32,
    buffered: tl.constexpr,
    whole: tl.constexpr,
    checked: tl.constexpr,
    block: tl.constexpr,
):
    """The momentum becomes `carry` times itself plus the gradient; if the step's gradient is `whole`, the residual receives
    `rate` times it. If the gradient is `checked` and not `sound`, it counts as 0."""
    start = tl.program_id(0).to(tl.int64) * block
    at = start + tl.arange(0, block)
    if start + block <= numel:
        _accumulate(gradient, momentum, residual, sound, carry, rate, buffered, whole, checked, at, None)
    else:
        _accumulate(gradient, momentum, residual, sound, carry, rate, buffered, whole, checked, at, at < numel)


@triton.jit
def _accumulate(
    gradient, momentum, residual, sound, carry, rate, buffered: tl.constexpr, whole: tl.constexpr, checked: tl.constexpr, at, mask
):
    g = tl.load(gradient + at, mask).to(tl.float32)
    if checked:
        g = tl.where(tl.load(sound) != 0, g, 0.0)
    if buffered:
        g = tl.load(momentum + at, mask) * carry + g
        tl.store(momentum + at, g, mask)
    if whole:
        tl.store(residual + at, tl.fma(g, rate, tl.load(residual + at, mask)), mask)
