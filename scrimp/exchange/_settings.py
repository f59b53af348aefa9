"""`Dense` and `Sparse`: how ranks exchange gradients, as data."""

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
    """Ranks average whole gradients, and shard the model data among them.

    >>> import scrimp
    >>> scrimp.Dense()
    Dense()
    """


@dataclass(frozen=True, kw_only=True)
class Sparse:
    """In every step each rank sends `density` of each parameter's entries, those with the largest update, and keeps the rest as a
    residual (error feedback). During the first `warm_up` steps the density falls from a quarter to `density`.

    `values`: format of the values sent, "bf16", "fp16" or "fp32". `residual`: format of the residual, "fp32", "bf16" or "int8".
    The residual is in units of weights, w - w', where w' is the weight that this rank alone would have by now, so "weight" is
    another name for "fp32". `place`: tier of the residuals of layers placed on the device: "device" or "host". "auto": what makes
    the fastest step within the budget, which placements and activations share; of equals the more precise one. `masking` clears
    the momentum of entries that were sent. Tensors of less than `small` elements are sent whole. Every `check_every` steps all
    ranks compare their weights, bit by bit.

    `choose`: send a layer whole in 16 bits if that takes less time than selecting and sending few entries, as on fast networks or
    among very many ranks; False: all layers are sparse. `of`: what the entries are. "update": of the update that the optimizer
    computes from each rank's own gradients, which works for language models too. "gradient": of the gradients, with the optimizer
    after the exchange, which converges worse with Adam.

    `axis`: under a plan, the mesh axis whose ranks exchange. The plan must replicate weights and states of all trained parameters
    along it. If just one axis is possible, it need not be given. Without a plan ranks exchange over the first axis of the mesh.

    Every rank has all weights and states, and the moments of its own gradients. The best learning rate may differ from that of a
    dense run, and is often twice as large.

    >>> import scrimp
    >>> exchange = scrimp.Sparse(density=0.01, warm_up=100)
    >>> exchange.density_at(0), exchange.density_at(100)
    (0.25, 0.01)
    """

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
    axis: str | None = None

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
        """The allowed format that takes the least memory."""
        return RESIDUAL_KINDS[-1] if self.residual == AUTO else self.residual

    def density_at(self, step: int) -> float:
        return density_at(step, self.density, self.warm_up)


def density_at(step: int, density: float, warm_up: int) -> float:
    """The density of a step: falls from a quarter to `density` by the same factor in every warm-up step."""
    if step >= warm_up:
        return density
    return float(max(density, START * (density / START) ** (step / warm_up)))
