"""One parameter's state on one rank: its momentum u, and its residual v, which is all that was not sent yet.

    u = momentum * u + gradient        once per step; further micro-batches are added to u: they need no buffer of their own
    v = v + u
    sent = the largest of v, rounded to what travels
    v = v - sent,  u = 0 there         (masking: what was sent is not to push on in the next steps)

With nothing kept back (density 1) momentum after the exchange is the same and needs no correction: then u and v are not
kept, and what is sent is the gradient.
"""

from __future__ import annotations

import torch

from scrimp.exchange._cut import COLUMNS, Cut
from scrimp.exchange._residual import Residual
from scrimp.exchange._select import select, take

PIECE = 16 * COLUMNS  # elements that are looked at together: 4 MiB in fp32, whatever the parameter's size


class Kept:
    """Flat, on one device."""

    def __init__(self, numel: int, device: torch.device, residual: Residual, *, momentum: float, masking: bool) -> None:
        self.numel = numel
        self.u = torch.zeros(numel, device=device) if momentum else None
        self.v = residual
        self._momentum = momentum
        self._masking = masking

    def add(self, gradient: torch.Tensor, *, first: bool = True) -> None:
        """`first` of the step's micro-batches."""
        if self.u is None:
            for span in _pieces(self.numel):
                values = self.v.read(span)
                self.v.write(span, values.add_(gradient[span]))
            return
        if first:
            self.u.mul_(self._momentum)
        self.u.add_(gradient)

    def send(self, how: Cut, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """What travels, as positions and values; from here on it is gone."""
        positions, values = [], []
        for span in _pieces(self.numel):
            rest = self.v.read(span)
            if self.u is not None:
                rest.add_(self.u[span])
            found = select(rest, part_of(how, span))
            values.append(take(rest, found, dtype))
            self.v.write(span, rest)
            if self.u is not None and self._masking:
                self.u[span][found] = 0
            positions.append(found + span.start)
        return torch.cat(positions), torch.cat(values)

    def give_back(self, positions: torch.Tensor, values: torch.Tensor) -> None:
        """What was sent, but was not used by anyone; u stays masked."""
        for span in _pieces(self.numel):
            mine = (positions >= span.start) & (positions < span.stop)
            rest = self.v.read(span)
            rest[positions[mine] - span.start] += values[mine].float()
            self.v.write(span, rest)


def part_of(how: Cut, span: slice) -> Cut:
    """Of whole rows, and, in the last span, the rest after them."""
    return Cut(numel=span.stop - span.start, per_row=how.per_row, from_rest=how.from_rest if span.stop == how.numel else 0)


def _pieces(numel: int) -> list[slice]:
    return [slice(start, min(start + PIECE, numel)) for start in range(0, numel, PIECE)]
