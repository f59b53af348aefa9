"""Lower bounds on a step's traffic and time, compared term by term with what the step took.

Traffic: with the chosen placements, no schedule can fetch fewer bytes than `least_fetched_nbytes`. Each gradient of a layer that
is not placed on the device goes down once.

Time: the least that each resource needs.

    compute       forward and backward as measured (`step/timing.py`), and updates on the device
    copies        bytes each way over the machine's rates, both ways at once as long as there are both; streamed master weights
                  and states go both ways
    host update   bytes that the host's updates touch, over its rate
    disk          states that are read and written there, at the best rates measured

Perfectly overlapped, a step takes the longest of them. If the gradients are checked before any update (clipping, skipping), no
update starts before the last gradient, and no backward starts before the forward that waits for the last update. Then a step
takes the longest of backward, copies down and copies of weights fetched a second time, plus the longest of forward, host update,
states read and copies up of the new weights.

One part cannot overlap. The forward from the last layer that the host updates waits for the last host update. No new gradient
arrives before that forward ends. So a step takes at least the host update and then that end of the forward.

There are two such bounds. `own` uses the usual rate of host updates in this engine, which includes the effect of overlapped
copies. `physical` uses the rate that `Cluster.probe` measures for the same kernel alone, and charges copies to the host's memory
as well.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass, field
from typing import TYPE_CHECKING

from scrimp.chunks import DEVICE, STREAMED, Store, least_fetched_nbytes
from scrimp.cluster import Machine
from scrimp.engine.schedule.planned import Planned
from scrimp.engine.schedule.probe import probe_at_rest
from scrimp.errors import RunError
from scrimp.ledger import format_nbytes

if TYPE_CHECKING:
    from scrimp.engine._training import Training

BACKWARD = 2  # a backward computes about twice a forward; used until one is measured
HOST_UPDATE, DISK_WRITE = "host update", "disk write"
THEN_END = "host update, then the forward's end"


@dataclass(frozen=True, kw_only=True)
class Phase:
    """A part of a step in which all resources may overlap: seconds of each resource."""

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
    """The least work of a step. `fresh_nbytes` are fetched after their update, `again_nbytes` once more in the same step.
    `end_seconds`: forward time from the last layer that the host updates."""

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
        """`charged`: copies use the host's memory bandwidth, in the phase in which they run."""
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
            Phase(name="backward, until the gradient check", terms=before),
            Phase(name="update and next forward", terms=after | {k: v for k, v in self.disk.items() if k != DISK_WRITE}),
        )

    def _then_end(self, terms: dict[str, float], host_seconds: float) -> None:
        if self.end_seconds and host_seconds:  # without the copies' share, because copies may overlap with that forward
            terms[THEN_END] = host_seconds + self.end_seconds

    def overlapped(self, *, checked: bool) -> dict[str, float]:
        """Seconds of work that may overlap with all phases: disk writes, until the same data is read again."""
        return {k: v for k, v in self.disk.items() if k == DISK_WRITE and checked}


@dataclass(frozen=True, kw_only=True)
class Bound:
    """What `engine.bound()` returns. `own`: phases at the host's usual rate in this engine. `physical`: phases at the machine's
    rate. `overlapped`: seconds of work that overlaps with all phases. The last step took `seconds`. In that step the host worker
    was busy for `busy_seconds`, and others waited for updates for `waited_seconds`."""

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
        """Where the seconds beyond `least_seconds` went, once for the host and once for the device; each adds up to all. Idle
        seconds count only beyond the bound, because a step as short as the bound has some too."""
        least, host, compute = self.least_seconds, _sum_of(self.own, HOST_UPDATE), _sum_of(self.own, "compute")
        gap = {"all": self.seconds - least}
        if host:
            gap["host, slower than usual"] = self.busy_seconds - host
            gap["host, idle beyond the bound"] = self.seconds - self.busy_seconds - (least - host)
        gap["device, waiting for updates beyond the bound"] = self.waited_seconds - (least - compute)
        gap["device, the rest (copies, launches, the gradient check)"] = self.seconds - compute - self.waited_seconds
        return gap

    def __str__(self) -> str:
        rows = [
            f"up    {format_nbytes(self.up_nbytes)}, at least {format_nbytes(self.least_up_nbytes)}",
            f"down  {format_nbytes(self.down_nbytes)}, at least {format_nbytes(self.least_down_nbytes)}",
            f"step  {self.seconds:.3f} s",
            f"least {self.least_seconds:.3f} s ({self._share(self.least_seconds)}), the host at the {self.own_rate / 1e9:.4g} "
            "GB/s of its last updates",
            *(f"  {phase}" for phase in self.own),
            *(f"  overlapped with all of that: {name} {seconds:.3f} s" for name, seconds in self.overlapped.items()),
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
        raise RunError("no bound yet: the first steps trace the model; call engine.bound() again after a step or two more")
    machine = probe_at_rest(engine.store)
    store, own_rate = planning.store, planning.usual_rate()
    load = _load(engine, plan)
    up, down = load.fresh_nbytes + load.again_nbytes, load.down_nbytes
    checked = engine.must_check
    own = load.phases(machine, own_rate, checked=checked, charged=False)
    physical = load.phases(machine, machine.host_update, checked=checked, charged=True)
    if _total(own) < _total(physical):  # the engine reached its own rate, so it is physically possible
        physical = own
    moved = [after - before for before, after in zip(engine.current.traffic, astuple(store.traffic), strict=True)]
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
    on_device = [placement.tier in (DEVICE, STREAMED) for placement in store.placements]
    # A layer placed on the device crosses no link, though with several ranks it is gathered and dropped there. Leaving it out
    # also frees its room, so the least traffic of the others remains a lower bound.
    nbytes = [0 if there else store.nbytes(k) for k, there in enumerate(on_device)]
    up = least_fetched_nbytes(plan.choice.schedule_steps, nbytes) // store.wire.world
    trained = [any(slot.trainable for slot in layer.slots) for layer in store.table.layers]
    fresh = min(up, sum(size for size, new in zip(nbytes, trained, strict=True) if new) // store.wire.world)
    forward = sum(timing.best.values())
    whole = timing.whole or (forward, BACKWARD * forward + sum(timing.best.get(k, 0.0) for k in plan.again))
    return Load(
        forward_seconds=whole[0],
        backward_seconds=whole[1],
        device_update_seconds=sum(c.update_nbytes for k, c in enumerate(plan.costs) if on_device[k])
        / engine.planning.rates.device,
        fresh_nbytes=fresh,
        again_nbytes=up - fresh,
        down_nbytes=sum(_gradients_nbytes(store, k) for k, there in enumerate(on_device) if not there),
        update_nbytes=sum(cost.update_nbytes for k, cost in enumerate(plan.costs) if not on_device[k]),
        passed_nbytes=sum(c.placement_nbytes for k, c in enumerate(plan.costs) if store.placements[k].tier == STREAMED),
        end_seconds=_end_seconds(
            store, plan, timing.best, [new and not there for new, there in zip(trained, on_device, strict=True)]
        ),
        disk=store.spill.least_seconds(),
    )


def _end_seconds(store: Store, plan: Planned, forward: dict[int, float], by_host: list[bool]) -> float:
    """Forward seconds of a micro-batch from the last layer that the host updates. A layer that contains others is not counted,
    because its time includes theirs."""
    assert plan.choice is not None
    paths = [layer.path for layer in store.table.layers]
    outer = {
        k for k, path in enumerate(paths) if any(other.startswith(f"{path}." if path else "") for other in paths if other != path)
    }
    order = list(dict.fromkeys(layer for schedule_step in plan.choice.schedule_steps for layer in schedule_step.needs))
    last = max((at for at, layer in enumerate(order) if by_host[layer]), default=len(order))
    return sum(forward.get(layer, 0.0) for layer in order[last:] if layer not in outer) / store.micro_batches


def _gradients_nbytes(store: Store, layer: int) -> int:
    """Gradient bytes that go down from this rank, without the padding between parameters, which is not sent."""
    slots = [slot for slot in store.table.layers[layer].slots if slot.trainable]
    pieces = (spans.inside for slot in slots for spans in store.shards.pieces(layer, slot))
    numel: int = sum(inside.stop - inside.start for inside in pieces)
    return numel * store.dtype_of(layer).itemsize * store.micro_batches  # in every micro-batch


def _total(phases: Iterable[Phase]) -> float:
    return sum(phase.seconds for phase in phases)


def _sum_of(phases: Iterable[Phase], name: str) -> float:
    return sum(phase.terms.get(name, 0.0) for phase in phases)
