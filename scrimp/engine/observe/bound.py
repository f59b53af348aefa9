"""How close a step came to what is possible: least traffic and time for its trace, beside what it took, term by term.

Traffic: with the homes that were chosen, no schedule can bring fewer bytes up than `least_fetched_nbytes` says; each
gradient of a layer whose home is not the device goes down once.

Time: what each resource needs at least.

    compute       forward and backward as measured (`_timing`), and the device's own updates
    copies        bytes each way over the machine's rates, both ways at once as long as there are both; masters and states
                  that pass through the device go both ways
    host update   bytes that the host's updates touch, over its rate
    disk          states that are read and written there, at the best rates seen

Perfectly overlapped, a step takes the longest of them. If gradients are judged before any update (clipping, skipping), no
update starts before the last gradient, and no backward before the forward that waits for the last update: then the longest
of backward, copies down and copies of weights that come a second time, plus the longest of forward, host update, states
read and copies up of the new weights.

One thing cannot overlap. The forward of the last layer that the host updates, and of all after it, waits for the last of
its updates; and no gradient that it could go on with is there before that forward has ended. So a step takes at least the
host's update and then that end of the forward.

There are two such bounds: with the rate that the host's updates usually have in this engine (beside copies, which are
therefore in it), and the physical one, with the rate that `Cluster.probe` finds for the same kernel alone, copies charged
to the host's memory as well.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass, field
from typing import TYPE_CHECKING

from scrimp.chunks import DEVICE, STREAMED, Store, least_fetched_nbytes
from scrimp.cluster import Machine
from scrimp.engine.schedule.planning import Planned
from scrimp.engine.schedule.probe import probe_at_rest
from scrimp.errors import RunError
from scrimp.ledger import format_nbytes

if TYPE_CHECKING:
    from scrimp.engine._training import Training

BACKWARD = 2  # a backward computes about twice a forward: until one was measured
HOST_UPDATE, DISK_WRITE = "host update", "disk write"
THEN_END = "host update, then the forward's end"


@dataclass(frozen=True, kw_only=True)
class Phase:
    """A part of a step in which everything may overlap: seconds of each resource."""

    name: str
    terms: dict[str, float]

    @property
    def seconds(self) -> float:
        return max(self.terms.values())

    def __str__(self) -> str:
        longest = max(self.terms, key=lambda name: self.terms[name])
        terms = (f"{name} {value:.3f} s{' (the longest)' if name == longest else ''}" for name, value in self.terms.items())
        return f"{self.name}: {', '.join(terms)}"


@dataclass(frozen=True, kw_only=True)
class Load:
    """What a step must do at least. `fresh_nbytes` come up after their update, `again_nbytes` another time. `end_seconds`:
    of the forward, from the last layer on that the host updates."""

    forward_seconds: float
    backward_seconds: float
    device_update_seconds: float
    fresh_nbytes: int
    again_nbytes: int
    down_nbytes: int
    update_nbytes: int
    passed_nbytes: int = 0
    end_seconds: float = 0.0
    disk: dict[str, float] = field(default_factory=dict)  # seconds of reading and of writing

    def phases(self, machine: Machine, host_rate: float, *, checked: bool, charged: bool) -> tuple[Phase, ...]:
        """`charged`: what is copied takes its share of the host's memory, in the phase in which it is copied."""
        share = 1 / host_rate if charged and self.update_nbytes else 0.0
        host_seconds = self.update_nbytes / host_rate
        forward, passed = self.forward_seconds + self.device_update_seconds, self.passed_nbytes
        if not checked:
            up, down = self.fresh_nbytes + self.again_nbytes + passed, self.down_nbytes + passed
            terms = {
                "compute": forward + self.backward_seconds,
                "copies up": up / machine.up,
                "copies down": down / machine.down,
                "copies both ways": machine.copy_seconds(up, down),
                HOST_UPDATE: host_seconds + (up + down) * share,
            }
            self._then_end(terms, host_seconds)
            return (Phase(name="all overlapped", terms=terms | self.disk),)
        before = {
            "compute": self.backward_seconds,
            "copies both ways": machine.copy_seconds(self.again_nbytes, self.down_nbytes),
            "host memory": (self.again_nbytes + self.down_nbytes) * share,
        }
        after = {
            "compute": forward,
            "copies up": self.fresh_nbytes / machine.up,
            "copies both ways": machine.copy_seconds(self.fresh_nbytes + passed, passed),
            HOST_UPDATE: host_seconds + (self.fresh_nbytes + 2 * passed) * share,
        }
        self._then_end(after, host_seconds)
        if not share:
            del before["host memory"]
        if not passed:
            del after["copies both ways"]
        return (
            Phase(name="backward, until the gradients are judged", terms=before),
            Phase(name="update and next forward", terms=after | {k: v for k, v in self.disk.items() if k != DISK_WRITE}),
        )

    def _then_end(self, terms: dict[str, float], host_seconds: float) -> None:
        if self.end_seconds and host_seconds:  # without the copies' share: they may go on beside that forward
            terms[THEN_END] = host_seconds + self.end_seconds

    def overlapped(self, *, checked: bool) -> dict[str, float]:
        """What may go on through all phases: writing, until the same is read again."""
        return {k: v for k, v in self.disk.items() if k == DISK_WRITE and checked}


@dataclass(frozen=True, kw_only=True)
class Bound:
    """`own` are the phases at the host's usual rate in this engine, `physical` those at the machine's; `overlapped`: seconds of
    what goes on through all of them. The last step took `seconds`; from the end of the one before to its end the host's
    worker was `busy_seconds` at work, and `waited_seconds` were spent waiting for updates."""

    up_nbytes: int
    down_nbytes: int
    least_up_nbytes: int
    least_down_nbytes: int
    own: tuple[Phase, ...]
    physical: tuple[Phase, ...]
    overlapped: dict[str, float]
    own_rate: float
    machine: Machine
    seconds: float
    busy_seconds: float
    waited_seconds: float

    @property
    def least_seconds(self) -> float:
        return max(_total(self.own), *self.overlapped.values(), 0.0)

    @property
    def physical_seconds(self) -> float:
        return max(_total(self.physical), *self.overlapped.values(), 0.0)

    @property
    def terms(self) -> dict[str, float]:
        """Seconds that each resource needs at least, at the host's own rate."""
        names = dict.fromkeys(name for phase in self.own for name in phase.terms)
        return {name: _sum_of(self.own, name) for name in names} | self.overlapped

    @property
    def gap(self) -> dict[str, float]:
        """Where the seconds beyond `least_seconds` went: the host's account of them and the device's, each of which adds
        up to all. Beyond the bound: a step as short as the bound has some idle seconds too."""
        least, host, compute = self.least_seconds, _sum_of(self.own, HOST_UPDATE), _sum_of(self.own, "compute")
        gap = {"all": self.seconds - least}
        if host:
            gap["host, slower than usual"] = self.busy_seconds - host
            gap["host, idle beyond the bound"] = self.seconds - self.busy_seconds - (least - host)
        gap["device, waiting for updates beyond the bound"] = self.waited_seconds - (least - compute)
        gap["device, the rest (copies, launches, judging)"] = self.seconds - compute - self.waited_seconds
        return gap

    def __str__(self) -> str:
        rows = [
            f"up    {format_nbytes(self.up_nbytes)}, at least {format_nbytes(self.least_up_nbytes)}",
            f"down  {format_nbytes(self.down_nbytes)}, at least {format_nbytes(self.least_down_nbytes)}",
            f"step  {self.seconds:.3f} s",
            f"least {self.least_seconds:.3f} s ({self._share(self.least_seconds)}), the host at the {self.own_rate / 1e9:.4g} "
            "GB/s of its last updates",
            *(f"  {phase}" for phase in self.own),
            *(f"  beside all of that: {name} {seconds:.3f} s" for name, seconds in self.overlapped.items()),
            f"least {self.physical_seconds:.3f} s ({self._share(self.physical_seconds)}), physically",
            *(f"  {phase}" for phase in self.physical),
            "gap",
            *(f"  {name}: {seconds:.3f} s" for name, seconds in self.gap.items()),
            "machine",
            *(f"  {name}: {figure}" for name, figure in self.machine.rows()),
        ]
        return "\n".join(rows)

    def _share(self, least: float) -> str:
        return f"{least / self.seconds:.0%} of the step" if self.seconds else "no step yet"


def bound(engine: Training) -> Bound:
    planning = engine.planning
    plan = planning.current
    if plan is None or plan.choice is None:
        raise RunError("no bound yet: the first steps trace the model; ask again after a step or two more")
    machine = probe_at_rest(engine.store)
    store, own_rate = planning.store, planning.usual_rate()
    load = _load(engine, plan)
    up, down = load.fresh_nbytes + load.again_nbytes, load.down_nbytes
    checked = engine.must_check
    own = load.phases(machine, own_rate, checked=checked, charged=False)
    physical = load.phases(machine, machine.host_update, checked=checked, charged=True)
    if _total(own) < _total(physical):  # what the engine reached is possible, whatever was found alone
        physical = own
    moved = [after - before for before, after in zip(engine._traffic, astuple(store.traffic), strict=True)]
    return Bound(
        up_nbytes=moved[0],
        down_nbytes=moved[1],
        least_up_nbytes=up + load.passed_nbytes,
        least_down_nbytes=down + load.passed_nbytes,
        own=own,
        physical=physical,
        overlapped=load.overlapped(checked=checked),
        own_rate=own_rate,
        machine=machine,
        seconds=engine.seconds,
        busy_seconds=engine.host_seconds[0],
        waited_seconds=engine.host_seconds[1],
    )


def _load(engine: Training, plan: Planned) -> Load:
    assert plan.choice is not None
    store, timing = engine.store, engine.residents.timing
    at_rest_nbytes = [placement.tier in (DEVICE, STREAMED) for placement in store.placements]
    # A layer at home on the device crosses nothing, though with several ranks it comes and goes there: left out altogether,
    # it takes no room either, and the least of the others is a bound still.
    nbytes = [0 if there else store.nbytes(k) for k, there in enumerate(at_rest_nbytes)]
    up = least_fetched_nbytes(plan.choice.schedule_steps, nbytes) // store.wire.world
    trained = [any(slot.trainable for slot in layer.slots) for layer in store.table.layers]
    fresh = min(up, sum(size for size, new in zip(nbytes, trained, strict=True) if new) // store.wire.world)
    forward = sum(timing.best.values())
    whole = timing.whole or (forward, BACKWARD * forward + sum(timing.best.get(k, 0.0) for k in plan.again))
    return Load(
        forward_seconds=whole[0],
        backward_seconds=whole[1],
        device_update_seconds=sum(c.update_nbytes for k, c in enumerate(plan.costs) if at_rest_nbytes[k])
        / engine.planning.rates.device,
        fresh_nbytes=fresh,
        again_nbytes=up - fresh,
        down_nbytes=sum(_gradients_nbytes(store, k) for k, there in enumerate(at_rest_nbytes) if not there),
        update_nbytes=sum(cost.update_nbytes for k, cost in enumerate(plan.costs) if not at_rest_nbytes[k]),
        passed_nbytes=sum(c.placement_nbytes for k, c in enumerate(plan.costs) if store.placements[k].tier == STREAMED),
        end_seconds=_end_seconds(
            store, plan, timing.best, [new and not there for new, there in zip(trained, at_rest_nbytes, strict=True)]
        ),
        disk=store.spill.least_seconds(),
    )


def _end_seconds(store: Store, plan: Planned, forward: dict[int, float], by_host: list[bool]) -> float:
    """Of a micro-batch's forward, from the last layer on whose update the host makes. A layer with others inside is not
    counted: its forward has theirs in it."""
    assert plan.choice is not None
    paths = [layer.path for layer in store.table.layers]
    outer = {
        k for k, path in enumerate(paths) if any(other.startswith(f"{path}." if path else "") for other in paths if other != path)
    }
    order = list(dict.fromkeys(layer for schedule_step in plan.choice.schedule_steps for layer in schedule_step.needs))
    last = max((at for at, layer in enumerate(order) if by_host[layer]), default=len(order))
    return sum(forward.get(layer, 0.0) for layer in order[last:] if layer not in outer) / store.micro_batches


def _gradients_nbytes(store: Store, layer: int) -> int:
    """What goes home from this rank: without the padding between parameters, which the arenas hold but nobody sends."""
    slots = [slot for slot in store.table.layers[layer].slots if slot.trainable]
    numel: int = sum(span.stop - span.start for slot in slots for _, span in store.shards.pieces(layer, slot))
    return numel * store.dtype_of(layer).itemsize * store.micro_batches  # every part's


def _total(phases: Iterable[Phase]) -> float:
    return sum(phase.seconds for phase in phases)


def _sum_of(phases: Iterable[Phase], name: str) -> float:
    return sum(phase.terms.get(name, 0.0) for phase in phases)
