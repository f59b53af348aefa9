"""How gradients travel, as data: whole, or a few entries of each."""

from __future__ import annotations

from dataclasses import dataclass

from scrimp.chunks import DTYPES
from scrimp.errors import RunError
from scrimp.exchange._bucket import SMALL
from scrimp.exchange._residual import RESIDUAL_KINDS

VALUES = (*DTYPES,)
RESIDUAL_PLACES = ("device", "host")
AUTO, WEIGHT = "auto", "weight"
OF = ("update", "gradient")
START = 0.25  # the density that a warm-up begins with


@dataclass(frozen=True, kw_only=True)
class Dense:
    """Every gradient travels whole, and homes are shared out over the ranks."""


@dataclass(frozen=True, kw_only=True)
class Sparse:
    """`density` of each parameter's entries travel in a step, those that would move it most; the rest waits. `warm_up` steps
    come down to it from a quarter.

    `values`: what travels, "bf16", "fp16" or "fp32". `residual`: how the rest is kept, "fp32", "bf16" or "int8"; it is in units
    of weights, w - w', w' being what this rank alone would have by now, so "weight" is another name of "fp32". `place`: where,
    for layers whose home is the device: there, or on the "host". "auto": what makes the fastest step within the budget, which
    pays for homes and activations too; of equals the one that is kept best. `masking` stops a momentum where something was
    sent. Tensors of less than `small` elements travel whole. Every `check_every` steps all ranks compare their weights, bit by
    bit.

    `choose`: layers for which sending all of them in 16 bits takes less time than finding and sending few entries travel whole,
    as on fast networks or among very many ranks; False: all are sparse. `of`: what the entries are of. "update": of what the
    optimizer makes of each rank's own gradients, which works for language models too; "gradient": of the gradients, the
    optimizer coming after the exchange, which is the weaker way with Adam.

    Every rank has all weights and states, and the moments of its own gradients: the learning rate that is best may be another,
    often twice that of a dense run."""

    density: float = 0.01
    warm_up: int = 0
    values: str = "bf16"
    residual: str = "fp32"
    place: str = "device"
    masking: bool = True
    small: int = SMALL
    check_every: int = 100
    choose: bool = True
    of: str = "update"

    def __post_init__(self) -> None:
        if self.residual == WEIGHT:
            object.__setattr__(self, "residual", RESIDUAL_KINDS[0])
        if not 0 < self.density <= 1:
            raise RunError(f"Sparse(density={self.density!r}) is not possible: more than 0, at most 1")
        for name, known in (
            ("values", VALUES),
            ("residual", (*RESIDUAL_KINDS, AUTO)),
            ("place", (*RESIDUAL_PLACES, AUTO)),
            ("of", OF),
        ):
            if getattr(self, name) not in known:
                there = ", ".join(map(repr, known))
                raise RunError(f"Sparse({name}={getattr(self, name)!r}) is not possible; there are {there}")
        for name, least in (("warm_up", 0), ("small", 0), ("check_every", 1)):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < least:
                raise RunError(f"Sparse({name}={getattr(self, name)!r}) is not possible: a whole number, at least {least}")

    @property
    def least_residual(self) -> str:
        """The kind that takes the least memory of those that are allowed."""
        return RESIDUAL_KINDS[-1] if self.residual == AUTO else self.residual

    def density_at(self, step: int) -> float:
        return density_at(step, self.density, self.warm_up)


def density_at(step: int, density: float, warm_up: int) -> float:
    """From a quarter down to `density`, by the same factor in every step."""
    if step >= warm_up:
        return density
    return float(max(density, START * (density / START) ** (step / warm_up)))
