"""The forms of torch's fused update kernels that the plain C of `kernels/host_plain.c` can take.

torch's kernels update whole vectors (the body), then the last elements one by one (the tail). Its processor, its compiler
and the two parts decide which products are rounded before they are added. Bits agree only if the form does.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

LANES = (4, 8, 16)  # fp32 numbers in a vector of 128, 256, 512 bits
SUMS = ("apart", "written", "first", "second")  # in the order of `enum sums`
NANS = ("quiet", "ones", "kept")  # in the order of `enum nan_kind`


@dataclass(frozen=True, kw_only=True)
class Form:
    """`body` and `tail`: which products are fused into their sums, one of SUMS. `nan`: how a NaN becomes bf16, one of NANS.
    `kernels/host_plain.c` says what each of them means."""

    copy_streams: int
    body: str
    tail: str
    nan: str

    @property
    def level(self) -> int:
        """As the C functions take it."""
        return self.copy_streams << 8 | SUMS.index(self.body) << 4 | SUMS.index(self.tail) << 2 | NANS.index(self.nan)

    def __str__(self) -> str:
        return f"compiled C, rounded as in torch's vectors of {self.copy_streams} lanes"


# The likeliest first: torch's wheels for aarch64 have (4, first, first, quiet) with NEON, (8, written, first, kept) with SVE.
FORMS = tuple(
    Form(copy_streams=copy_streams, body=body, tail=tail, nan=nan)
    for tail, nan, copy_streams, body in product(
        ("first", "second", "apart"), ("quiet", "kept", "ones"), LANES, ("first", "written", "second", "apart")
    )
)
_BY_LEVEL = {form.level: form for form in FORMS}


def form_of(level: int) -> Form | None:
    """The form that is meant; None where `level` is an instruction set."""
    return _BY_LEVEL.get(level)
