"""One parameter on one rank, between its gradient and what travels of it.

    momentum    u = momentum * u + gradient, once per step; further micro-batches are added to u: they need no buffer of their
                own. What it adds to the residual v is lr * u.
    adaptive    Adam's moments m and s of this rank's gradients; it adds lr * m / (sqrt(s) + eps), both without bias.

    v = v + what the rule adds
    sent = the largest of v, rounded to what travels
    v = v - sent,  u = 0 there          (masking: what was sent is not to push on in the next steps)

With the learning rate inside, what waits counts as it would have counted when it was found, whatever the rate is by the time
it travels; where the rate is applied after the exchange, it is 1 here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from scrimp.exchange._cut import COLUMNS, Cut
from scrimp.exchange._residual import Residual
from scrimp.exchange._select import select, take

ROWS = 4  # that are looked at together on the host, 1 MiB in fp32, whatever the parameter's size
CUDA_ROWS = 32  # enough to keep a device busy


@dataclass(frozen=True, kw_only=True)
class Momentum:
    """As SGD has it."""

    momentum: float

    def carry(self, states: list[torch.Tensor]) -> None:
        for u in states:
            u.mul_(self.momentum)

    def add(self, states: list[torch.Tensor], gradient: torch.Tensor) -> None:
        for u in states:
            u.add_(gradient)

    def adds(self, states: list[torch.Tensor], rest: torch.Tensor, lr: float, count: int) -> None:
        for u in states:
            rest.add_(u, alpha=lr)


@dataclass(frozen=True, kw_only=True)
class Adaptive:
    """As Adam has it; a step's gradient comes as a whole, since squares of parts do not add up to its square."""

    betas: tuple[float, float]
    eps: float

    def carry(self, states: list[torch.Tensor]) -> None: ...

    def add(self, states: list[torch.Tensor], gradient: torch.Tensor) -> None:
        m, s = states
        m.lerp_(gradient, 1 - self.betas[0])
        s.mul_(self.betas[1]).addcmul_(gradient, gradient, value=1 - self.betas[1])

    def adds(self, states: list[torch.Tensor], rest: torch.Tensor, lr: float, count: int) -> None:
        m, s = states
        root = s.sqrt().div_((1 - self.betas[1] ** count) ** 0.5).add_(self.eps)
        rest.addcdiv_(m, root, value=lr / (1 - self.betas[0] ** count))


Rule = Momentum | Adaptive


@dataclass(frozen=True, kw_only=True)
class Kept:
    """Flat, on one device. `states` are the rule's, the momentum first; there are none without momentum, and then gradients
    go into the residual at once."""

    rule: Rule
    states: list[torch.Tensor]
    rest: Residual
    numel: int
    masking: bool = True

    def add(self, gradient: torch.Tensor, lr: float, *, first: bool = True, sound: torch.Tensor | None = None) -> None:
        """A gradient of any type; `first` of the step's micro-batches; nothing, unless `sound`, a flag on its device."""
        for span in pieces(self.numel, gradient.device):
            states, fresh = [state[span] for state in self.states], gradient[span].float()
            if sound is not None:
                fresh = torch.where(sound, fresh, 0.0)
            if first:
                self.rule.carry(states)
            self.rule.add(states, fresh)
            if not states:
                self.rest.write(span, self.rest.read(span).add_(fresh, alpha=lr))

    def send(self, how: Cut, dtype: torch.dtype, lr: float, count: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
        """What travels, as positions and values; from here on it is gone. `count`: of the parameter's steps, this included."""
        positions, values = [], []
        for span in pieces(self.numel, self.rest.device):
            states, rest = [state[span] for state in self.states], self.rest.read(span)
            self.rule.adds(states, rest, lr, count)
            found = select(rest, part_of(how, span))
            values.append(take(rest, found, dtype))
            self.rest.write(span, rest)
            if states and self.masking:
                states[0][found] = 0
            positions.append(found + span.start)
        return torch.cat(positions), torch.cat(values)

    def give_back(self, positions: torch.Tensor, values: torch.Tensor) -> None:
        """What was sent, but was not used by anyone; u stays masked."""
        for span in pieces(self.numel, self.rest.device):
            mine = (positions >= span.start) & (positions < span.stop)
            rest = self.rest.read(span)
            rest[positions[mine] - span.start] += values[mine].float()
            self.rest.write(span, rest)


def part_of(how: Cut, span: slice) -> Cut:
    """Of whole rows, and, in the last span, the rest after them."""
    return Cut(numel=span.stop - span.start, per_row=how.per_row, from_rest=how.from_rest if span.stop == how.numel else 0)


def pieces(numel: int, device: torch.device) -> Iterator[slice]:
    length = COLUMNS * (CUDA_ROWS if device.type == "cuda" else ROWS)
    for start in range(0, numel, length):
        yield slice(start, min(start + length, numel))
