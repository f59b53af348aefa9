"""The rounding variants ("forms") of torch's fused update kernels that `kernels/host_plain.c` can reproduce.

torch's kernels update whole vectors (the body), then the last elements one by one (the tail). The processor, the compiler and the
part decide which products are rounded before they are added. Bits agree only if the form does.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

LANES = (4, 8, 16)  # fp32 numbers in a vector of 128, 256, 512 bits
SUMS = ("apart", "written", "first", "second")  # in the order of `enum sums`
NANS = ("quiet", "ones", "kept")  # in the order of `enum nan_kind`


@dataclass(frozen=True, kw_only=True)
class Form:
    """`lanes`: vector length. `body` and `tail`: which products are fused into their sums, one of SUMS. `nan`: how a NaN becomes
    bf16, one of NANS. `kernels/host_plain.c` documents each value."""

    lanes: int
    body: str
    tail: str
    nan: str

    @property
    def level(self) -> int:
        """The code of the form for the C functions."""
        return self.lanes << 8 | SUMS.index(self.body) << 4 | SUMS.index(self.tail) << 2 | NANS.index(self.nan)

    def __str__(self) -> str:
        return f"compiled C, rounded as in torch's vectors of {self.lanes} lanes"


# The likeliest first: torch's wheels for aarch64 have (4, first, first, quiet) with NEON, (8, written, first, kept) with SVE.
FORMS = tuple(
    Form(lanes=lanes, body=body, tail=tail, nan=nan)
    for tail, nan, lanes, body in product(
        ("first", "second", "apart"), ("quiet", "kept", "ones"), LANES, ("first", "written", "second", "apart")
    )
)
_BY_LEVEL = {form.level: form for form in FORMS}


def form_of(level: int) -> Form | None:
    """The form with this code; None if `level` is an instruction set."""
    return _BY_LEVEL.get(level)
