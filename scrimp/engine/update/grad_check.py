"""The global gradient check, between the last backward and the first update: finite? norm? by which factor to scale?

In fp16 the loss is scaled up before backward, so that small gradients do not underflow. The update scales the gradients down
again. The scale halves when a gradient overflows (and the update is skipped), and doubles after many good steps. Scales are
powers of two, so scaling changes no bit of a value that does not overflow.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from scrimp.chunks import Slot, Store, gradient_norm

FIRST_SCALE, GOOD_STEPS = 2.0**16, 2000


@dataclass
class LossScale:
    """Loss scale: constant 1 unless `dynamic` (fp16)."""

    dynamic: bool
    value: float = 1.0
    good: int = 0

    def __post_init__(self) -> None:
        if self.dynamic:
            self.value = FIRST_SCALE

    def saw(self, *, finite: bool) -> None:
        if not self.dynamic:
            return
        self.good = self.good + 1 if finite else 0
        if not finite:
            self.value = max(1.0, self.value / 2)
        elif self.good % GOOD_STEPS == 0:
            self.value *= 2


@dataclass(frozen=True, kw_only=True)
class GradientCheck:
    """`bad`: the first parameter whose gradient is not finite. `scale`: the factor that the update applies to gradients."""

    norm: float | None = None
    bad: str | None = None
    scale: torch.Tensor | None = None


def check_gradients(
    store: Store,
    arrived: list[tuple[int, Slot]],
    known: Mapping[str, torch.Tensor],
    *,
    clip: float | None,
    loss_scale: float,
) -> GradientCheck:
    """All ranks get the same result. `known`: norms that were computed on the device, while the gradients were there."""
    rows, together = [], store.wire.world > 1 or store.tiling is not None
    for layer, slot in arrived:
        if slot.name in known:
            rows.append(known[slot.name])
            continue
        parts = [gradient_norm(gradient) for gradient in store.gradients_of(layer, slot)]
        if store.tiling is not None and not store.tiling.counts(slot.name):
            parts = [torch.zeros(())]  # another rank counts it
        if together:
            parts = [sum((part.cpu() * part.cpu() for part in parts), start=torch.zeros(()))]
        rows.append(parts[0] if parts else torch.zeros(()))  # of a parameter without elements
    if not rows:
        return GradientCheck()
    norms = _on_host(rows)
    if together:
        norms = (store.wire if store.tiling is None else store.ranks).sum(norms).sqrt()
    total = torch.linalg.vector_norm(norms) / loss_scale
    bad = None
    if not bool(torch.isfinite(total)):
        bad = next((slot.name for (_, slot), value in zip(arrived, norms, strict=True) if not value.isfinite()), "their sum")
    scale = None
    if clip is not None:
        scale = torch.clamp(clip / (total + 1e-6), max=1.0)
    if loss_scale != 1.0:
        scale = (torch.ones(()) if scale is None else scale) / loss_scale
    return GradientCheck(norm=float(total), bad=bad, scale=scale)


def _on_host(rows: list[torch.Tensor]) -> torch.Tensor:
    """Norms on the host, by one transfer, which waits for the device."""
    there = [k for k, row in enumerate(rows) if row.is_cuda]
    if there:
        for k, row in zip(there, torch.stack([rows[k] for k in there]).cpu(), strict=True):
            rows[k] = row
    return torch.stack(rows)
