"""How close a step came to what is possible: least traffic and time for its trace, beside what it took, term by term.

Traffic: with the homes that were chosen, no schedule can bring fewer bytes up than `least_fetched_nbytes` says; each
gradient of a layer whose home is not the device goes down once. Time: compute, copies up, copies down and the host's
update each take at least their bytes over the measured rate; perfectly overlapped, a step takes the longest of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from scrimp.chunks._home import DEVICE
from scrimp.chunks._residency import least_fetched_nbytes
from scrimp.chunks._store import Store
from scrimp.engine._planning import Planning
from scrimp.errors import RunError
from scrimp.ledger import format_nbytes

BACKWARD = 2  # a backward computes about twice a forward


@dataclass(frozen=True, kw_only=True)
class Bound:
    """`terms`: seconds that each resource needs at least; the step's bound is the longest of them."""

    up_nbytes: int
    down_nbytes: int
    least_up_nbytes: int
    least_down_nbytes: int
    terms: dict[str, float]
    seconds: float

    @property
    def least_seconds(self) -> float:
        return max(self.terms.values())

    def __str__(self) -> str:
        rows = [
            f"up    {format_nbytes(self.up_nbytes)}, at least {format_nbytes(self.least_up_nbytes)}",
            f"down  {format_nbytes(self.down_nbytes)}, at least {format_nbytes(self.least_down_nbytes)}",
            f"step  {self.seconds:.3f} s, at least {self.least_seconds:.3f} s",
        ]
        longest = max(self.terms, key=lambda name: self.terms[name])
        rows += [f"  {name}: {value:.3f} s{' (the bound)' if name == longest else ''}" for name, value in self.terms.items()]
        return "\n".join(rows)


def bound(planning: Planning, moved: Sequence[int], forward: dict[int, float], seconds: float) -> Bound:
    """`forward`: seconds of each layer's."""
    plan = planning.current
    if plan is None or plan.choice is None:
        raise RunError("no bound yet: the first steps trace the model; ask again after a step or two more")
    store, rates = planning.store, planning.rates
    homes = [home.place == DEVICE for home in store.homes]
    # A layer at home on the device crosses nothing, though with several ranks it comes and goes there: left out altogether,
    # it takes no room either, and the least of the others is a bound still.
    nbytes = [0 if at_home else store.nbytes(k) for k, at_home in enumerate(homes)]
    up = least_fetched_nbytes(plan.choice.moments, nbytes) // store.wire.world
    down = sum(_gradients_nbytes(store, k) for k in range(len(homes)) if not homes[k])
    host = sum(cost.update_nbytes for k, cost in enumerate(plan.costs) if not homes[k])
    device = sum(cost.update_nbytes for k, cost in enumerate(plan.costs) if homes[k])
    again = sum(forward.get(k, 0.0) for k in plan.again)
    return Bound(
        up_nbytes=moved[0],
        down_nbytes=moved[1],
        least_up_nbytes=up,
        least_down_nbytes=down,
        terms={
            "compute": sum(forward.values()) * (1 + BACKWARD) + again + device / rates.device,
            "copies up": up / rates.up,
            "copies down": down / rates.down,
            "host update": host / rates.host,
            **store.spill.least_seconds(),
        },
        seconds=seconds,
    )


def _gradients_nbytes(store: Store, layer: int) -> int:
    """What goes home from this rank: without the padding between parameters, which the arenas hold but nobody sends."""
    slots = [slot for slot in store.table.layers[layer].slots if slot.trainable]
    numel: int = sum(span.stop - span.start for slot in slots for _, span in store.shards.pieces(layer, slot))
    return numel * store.dtype_of(layer).itemsize * store.accumulate  # every part's
