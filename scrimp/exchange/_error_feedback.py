"""Error feedback of one parameter on one rank: from its gradient to the entries that are sent.

    momentum    u = momentum * u + gradient, once per step; further micro-batches are added to u, so they need no buffer of their
                own. It adds lr * u to the residual v.
    adaptive    Adam's moments m and s of this rank's gradients; it adds lr * m / (sqrt(s) + eps), both bias-corrected.

    v = v + what the rule adds
    sent = the top-k of v, rounded to the format that is sent
    v = v - sent,  u = 0 there          (masking: what was sent must not continue to push in the next steps)

The residual includes the learning rate, so an entry counts with the rate of the step that produced it, whatever the rate is when
it is sent. If the rate is applied after the exchange, it is 1 here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite

import torch

from scrimp.exchange._native_select import NativeSelect, Numbers, host_selection, takes
from scrimp.exchange._packet import pack
from scrimp.exchange._residual import Residual
from scrimp.exchange._row_topk import COLUMNS, RowTopK
from scrimp.exchange._select import select_topk, take
from scrimp.exchange._select_fused import device_selection

ROWS = 4  # rows processed together on the host, 1 MiB in fp32, whatever the parameter's size
CUDA_ROWS = 16  # enough to keep a device busy


@dataclass(frozen=True, kw_only=True)
class Momentum:
    """The rule of SGD."""

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

    def numbers(self, lr: float, count: int, *, first: bool) -> Numbers:
        return Numbers(carry=self.momentum if first else 1.0, rate=lr)


@dataclass(frozen=True, kw_only=True)
class Adaptive:
    """The rule of Adam. It needs a step's whole gradient, because squares of micro-batches do not add up to its square."""

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

    def numbers(self, lr: float, count: int, *, first: bool) -> Numbers:
        root = (1 - self.betas[1] ** count) ** 0.5  # multiplied into numerator and denominator, so that s need not be divided
        return Numbers(betas=self.betas, rate=lr * root / (1 - self.betas[0] ** count), eps=self.eps * root)


Rule = Momentum | Adaptive


@dataclass(frozen=True, kw_only=True)
class ErrorFeedback:
    """Flat tensors on one device. `states` are the rule's, the momentum first. Without momentum there are none, and gradients go
    directly into the residual."""

    rule: Rule
    states: list[torch.Tensor]
    rest: Residual
    numel: int
    masking: bool = True

    def add(self, gradient: torch.Tensor, lr: float, *, first: bool = True, sound: torch.Tensor | None = None) -> None:
        """Add a gradient of any dtype. `first`: of the step's micro-batches. `sound`: a flag on its device; False adds 0."""
        kernel = self._kernel(gradient) if sound is None else None
        for span in self._spans(kernel, whole=bool(self.states)):
            states, fresh = [state[span] for state in self.states], gradient[span]
            if kernel is not None:
                rest = None if states else self.rest.read(span)
                kernel.add(rest, states, fresh, self.rule.numbers(lr, 1, first=first))
                if rest is not None:
                    self.rest.write(span, rest)
                continue
            fresh = fresh.float()
            if sound is not None:
                fresh = fresh.masked_fill(~sound, 0.0)
            if first:
                self.rule.carry(states)
            self.rule.add(states, fresh)
            if not states:
                self.rest.write(span, self.rest.read(span).add_(fresh, alpha=lr))

    def send(self, how: RowTopK, dtype: torch.dtype, lr: float, count: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
        """Remove the top-k from the residual and return their positions and values. `count`: the parameter's number of steps,
        this one included."""
        return self._send(how, dtype, lr, count, self._kernel(), None, first=True)

    def add_and_send(
        self, gradient: torch.Tensor, how: RowTopK, dtype: torch.dtype, lr: float, count: int = 1, *, first: bool = True,
        sound: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Both, for the last of a step's micro-batches; on the host in one pass over memory."""
        kernel = self._kernel(gradient) if sound is None else None
        if kernel is None:
            self.add(gradient, lr, first=first, sound=sound)
            return self.send(how, dtype, lr, count)
        return self._send(how, dtype, lr, count, kernel, gradient, first=first)

    def send_into(
        self, packet: torch.Tensor, gradient: torch.Tensor, how: RowTopK, dtype: torch.dtype, lr: float, count: int = 1, *,
        first: bool = True, sound: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        """The same, into a packet's bytes; on a GPU without waiting for it, and with little scratch memory."""
        kernel = device_selection(self.rest.device, dtype) if self.rest.in_place and isinstance(self.rule, Momentum) else None
        native = self._kernel(gradient) if sound is None and self.rest.in_place else None
        if native is not None:
            rest, numbers = self.rest.read(slice(0, self.numel)), self.rule.numbers(lr, count, first=first)
            native.send_into(packet, rest, self.states, how, dtype, numbers, masking=self.masking, gradient=gradient)
            return
        if kernel is None:
            pack(packet, how, *self.add_and_send(gradient, how, dtype, lr, count, first=first, sound=sound))
            return
        (rest,), u = self.rest.tensors.values(), self.states[0] if self.states else None
        carry = self.rule.momentum if first and isinstance(self.rule, Momentum) else 1.0
        kernel.accumulate(gradient, u, rest, carry=carry, whole=True, rate=lr, sound=sound)
        kernel.send(rest, how, packet, dtype, u if self.masking else None)

    def _send(
        self, how: RowTopK, dtype: torch.dtype, lr: float, count: int, kernel: NativeSelect | None, gradient: torch.Tensor |
        None, *, first: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        positions, values = [], []
        for span in self._spans(kernel):
            states, rest = [state[span] for state in self.states], self.rest.read(span)
            if kernel is not None:
                numbers, fresh = self.rule.numbers(lr, count, first=first), None if gradient is None else gradient[span]
                found, sent = kernel.send(rest, states, part_of(how, span), dtype, numbers, masking=self.masking, gradient=fresh)
            else:
                self.rule.adds(states, rest, lr, count)
                found = select_topk(rest, part_of(how, span))
                sent = take(rest, found, dtype)
                if states and self.masking:
                    states[0][found] = 0
            self.rest.write(span, rest)
            values.append(sent)
            positions.append(found + span.start)
        return torch.cat(positions), torch.cat(values)

    def give_back(self, positions: torch.Tensor, values: torch.Tensor) -> None:
        """Return entries to the residual that were sent but not applied; u stays masked."""
        for span in feedback_pieces(self.numel, self.rest.device):
            mine = (positions >= span.start) & (positions < span.stop)
            rest = self.rest.read(span)
            rest[positions[mine] - span.start] += values[mine].float()
            self.rest.write(span, rest)

    def _kernel(self, gradient: torch.Tensor | None = None) -> NativeSelect | None:
        """The host kernel, if it is available and accepts the tensors."""
        return host_selection() if self.rest.device.type == "cpu" and takes(self.states, gradient) else None

    def _spans(self, kernel: NativeSelect | None, *, whole: bool = False) -> Iterator[slice]:
        """The kernel takes the whole tensor at once, if that needs no copy."""
        at_once = kernel is not None and (whole or self.rest.in_place)
        return iter((slice(0, self.numel),)) if at_once else feedback_pieces(self.numel, self.rest.device)


def finite(gradient: torch.Tensor) -> bool:
    """A sum is fast, and nearly always finite if all elements are; otherwise all elements are checked."""
    return isfinite(gradient.sum()) or bool(torch.isfinite(gradient).all())


def part_of(how: RowTopK, span: slice) -> RowTopK:
    """The selection for a span of whole rows, and in the last span also the remainder."""
    return RowTopK(numel=span.stop - span.start, per_row=how.per_row, from_rest=how.from_rest if span.stop == how.numel else 0)


def largest_piece(numel: int, device: torch.device) -> int:
    return min(numel, COLUMNS * (CUDA_ROWS if device.type == "cuda" else ROWS))


def feedback_pieces(numel: int, device: torch.device) -> Iterator[slice]:
    length = max(1, largest_piece(numel, device))
    for start in range(0, numel, length):
        yield slice(start, min(start + length, numel))
