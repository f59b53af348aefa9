"""Runs the gathers and reductions of a step: bucket by bucket, and beside the operators where there is room for that.

    gather   | started | other work ...       | waited for where its first weight is due |
    sum      | started where the last gradient is made | other work ... | waited for later |

Ranks start in one order, and wait in one order: both follow from `Buckets` and `Overlap`, which are the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from scrimp.lower.footprint import Pass
from scrimp.lower.moves import Communicator, Start, at_once, behind
from scrimp.lower.weights.buckets import Buckets
from scrimp.lower.weights.joined import gathering_together, summing_together
from scrimp.lower.weights.overlap import Hook, Overlap
from scrimp.lower.weights.rest import Rest
from scrimp.lower.weights.tiles import gathering, padded, summing
from scrimp.planner import Placed


class Summed(NamedTuple):
    """A gradient that a layer has made: its flat share, summed."""

    layer: int
    name: str
    flat: torch.Tensor


class _Sum(NamedTuple):
    """A reduction on its way: of which pass, until where, of which gradients, and a function that waits for them."""

    of: Pass
    until: Hook
    names: list[str]
    finish: Callable[[], list[torch.Tensor]]


class Together:
    """`share`: a weight's share at rest, flat. `across`: whether shares of all layers are there while one layer runs; if not, all
    that a pass starts ends in it."""

    across = True

    def __init__(
        self,
        buckets: Buckets,
        overlap: Overlap,
        rest: Mapping[str, Rest],
        comm: Communicator,
        later: Mapping[str, tuple[str, ...]],
        share: Callable[[str], torch.Tensor],
    ) -> None:
        self.buckets, self.overlap, self.rest, self.comm, self.later, self._share = buckets, overlap, rest, comm, later, share
        self._pass: Pass = (0, False)
        self._due = 0  # the number of the next gather, and of the next gradient
        self._made = 0
        self._brought: dict[int, torch.Tensor] = {}
        self._waiting: dict[int, tuple[str, torch.Tensor]] = {}
        self._kept: dict[str, torch.Tensor] = {}  # from the last layer's forward for its backward
        self._coming: dict[tuple[Pass, int], Callable[[], dict[int, torch.Tensor]]] = {}  # gathers on their way
        self._going: list[_Sum] = []

    def settle(self) -> None:
        """Waits for what a step that failed has left on its way."""
        while self._coming:
            self._coming.pop(next(iter(self._coming)))()
        while self._going:
            self._going.pop(0).finish()

    def enter(self, layer: int, *, backward: bool) -> None:
        self._pass, self._due, self._made = (layer, backward), 0, 0
        self._brought.clear()
        self._waiting.clear()
        if not backward:
            self._kept.clear()

    def leave(self) -> list[Summed]:
        """The gradients whose sums end with the pass."""
        return self._ended((self._pass, "end", 0), every=not self.across)

    @property
    def room_nbytes(self) -> int:
        """What may be held besides before the first step of the pass."""
        return self.overlap.room_nbytes.get(self._pass, 0)

    # Gathers.

    def gather(self, name: str) -> torch.Tensor:
        """The next gather of the pass. Weights of its bucket that are due later are held until then."""
        number, found = self._due, self.buckets.passes.get(self._pass)
        self._due += 1
        if name in self._kept:
            tile = self._kept.pop(name)
        else:
            if (self._pass, number) in self._coming:
                self._brought.update(self._coming.pop((self._pass, number))())
            elif number not in self._brought:
                self._brought.update(self._gathering(self._pass, number, name, at_once(self.comm))())
            tile = self._brought.pop(number)
            if found is not None and name in found.kept and not self._pass[1]:
                self._kept[name] = tile
        self._start((self._pass, "gather", number))
        return tile

    def _start(self, hook: Hook) -> None:
        for of, number in self.overlap.starts.get(hook, ()):
            if of == self._pass or self.across:
                self.start_gather(of, number, self.buckets.names[of][number])

    def start_gather(self, of: Pass, number: int, name: str) -> None:
        """Errors name it."""
        self._coming[of, number] = self._gathering(of, number, name, behind(self.comm))

    def _gathering(self, of: Pass, number: int, name: str, start: Start) -> Callable[[], dict[int, torch.Tensor]]:
        found = self.buckets.passes.get(of)
        numbers = found.bring[number] if found is not None else (number,)
        if found is None or (len(numbers) < 2 and number not in found.spread):
            tile = gathering(self.comm.mesh, self._share(name), self.rest[name], self.rest[name].weight, start)
            return lambda: {number: tile()}
        names = [self.buckets.names[of][each] for each in numbers]
        tiles = gathering_together(self.comm, [*map(self._share, names)], [self.rest[each] for each in names], start)
        return lambda: dict(zip(numbers, tiles(), strict=True))

    # Sums.

    def sum(self, name: str, gradient: torch.Tensor, place: Placed, *, donate: bool) -> list[Summed]:
        """Takes the next gradient of the pass. Returns the gradients whose sums end now."""
        number, found = self._made, self.buckets.passes.get(self._pass)
        self._made += 1
        ended = self._ended((self._pass, "sum", number))
        numbers = found.sum[number] if found is not None else (number,)
        until = self.overlap.ends.get((self._pass, "sum", number))
        start = at_once(self.comm) if until is None else behind(self.comm)
        each, later = self.rest[name], self.later.get(name, ())
        over = each.gradient if later else each.states
        if numbers == (number,):
            handle, names = summing(self.comm, gradient, place, each, over, start, later=later, donate=donate), [name]
            del gradient
            going = _Sum(self._pass, until or (self._pass, "sum", number), names, lambda: [handle.wait()])
        else:
            self._waiting[number] = name, padded(gradient, each, self.comm.mesh)
            del gradient
            if numbers:
                names, flats = (list(part) for part in zip(*(self._waiting.pop(each) for each in numbers), strict=True))
                finish = summing_together(self.comm.mesh, flats, ((), place.partial), (over, later), start)
                going = _Sum(self._pass, until or (self._pass, "sum", number), names, finish)
        if numbers and until is None:
            ended += self.end_sum(*going)
        elif numbers:
            self._going.append(going)
        self._start((self._pass, "sum", number))
        return ended

    def _ended(self, hook: Hook, *, every: bool = False) -> list[Summed]:
        ended: list[Summed] = []
        while self._going and (every or self._going[0].until == hook):
            ended += self.end_sum(*self._going.pop(0))
        return ended

    def end_sum(self, of: Pass, until: Hook, names: list[str], finish: Callable[[], list[torch.Tensor]]) -> list[Summed]:
        """Errors name it."""
        return [Summed(of[0], name, flat) for name, flat in zip(names, finish(), strict=True)]
