"""Turns a traced step into the plan of the next steps: which layers keep activations, which layers are placed on the device, and
the prefetch schedule of the others.

A batch with a new shape is traced twice. The first trace recomputes every layer, which takes the least memory. The second keeps
the activations that fit, which shows what they really take. The schedule then holds for all batches of that shape, and a smaller
batch uses the schedule of a larger one. All ranks decide alike: they share their measurements and plan for the largest.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from statistics import median

import torch

from scrimp._arguments import KEEP, OFFLOAD, RECOMPUTE
from scrimp._warnings import warn
from scrimp.chunks import (
    DEVICE,
    DISK,
    HOST,
    STREAMED,
    Choice,
    LayerCost,
    Rates,
    ScheduleStep,
    Store,
    Wire,
    choose_placement,
    stages_nbytes,
)
from scrimp.engine.entry.rank_calls import same_calls, same_settings
from scrimp.engine.gradients.residuals import Residuals, Way
from scrimp.engine.schedule.planned import Planned
from scrimp.engine.schedule.probe import overlapped_updates
from scrimp.engine.setup.process_groups import agreed
from scrimp.engine.step.batch import Signature, covers
from scrimp.engine.step.layer_forward import Recompute
from scrimp.engine.step.residency import Residents
from scrimp.engine.update.streamed_update import largest_numel
from scrimp.errors import FitError

MOST_PLANS, MOST_SIZES = 64, 255
WORTH_STREAMING = 0.2  # of a step's seconds, predicted: copies, updates and compute never overlap quite so well
WORTH_ROUNDING = 0.02  # of a step's seconds: for a smaller gain residuals keep the more precise format
MOST_REPLANS = 5  # a model that runs its layers in a new order every step is no longer planned for


class Planning:
    """Makes, keeps and applies the plans of all batch shapes."""

    def __init__(
        self,
        store: Store,
        recompute: Recompute,
        ways: tuple[str, ...],
        rates: Rates,
        room_nbytes: int,
        *,
        stage_nbytes: int,
        streaming: Callable[[bool], None],
        residuals: Residuals | None = None,
        sending_nbytes: int = 0,
        stage: Wire | None = None,
    ) -> None:
        self.store = store
        self.recompute = recompute
        self.ways = ways  # allowed treatments of activations
        self.rates = rates
        self.room_nbytes = room_nbytes  # of the device, for weights and everything the meter counts
        self.stage_nbytes = stage_nbytes  # staging buffer of an update on the device
        self.overlapped = store.copy_streams.overlapped
        self.checked = True  # all gradients are checked before any update
        self.call = [0, 0, 0]  # this rank's current call, by `Calls.row`, and a digest of its optimizer's settings
        self.streaming = streaming  # allocates the buffers of streamed updates, or frees them
        self.typical = True  # the batch has the same shape as the last planned one
        self.current: Planned | None = None
        self._digested: Planned | None = None  # the last plan made
        self.residuals = residuals
        self.sending_nbytes = sending_nbytes  # device bytes of a sparse exchange; a trace without layers on the device lacks them
        self._stage = stage  # under a plan: the ranks of this one's pipeline stage
        self._updates, self._best_update = 0, 0.0
        self._recent_updates: deque[float] = deque(maxlen=5)
        self._plans: dict[Signature | bytes, Planned] = {}
        self._on_device: frozenset[int] | None = None  # layers placed on the device; None: not chosen yet
        self._streamed: frozenset[int] | None = None
        # Placed on the device from the start, because the host has no room for them.
        self._fixed = frozenset(k for k, placement in enumerate(store.placements) if placement.tier == DEVICE)

    def prepare(self, signature: Signature) -> Planned:
        """The plan for a batch, perhaps still empty. Recomputation is set accordingly."""
        key = self._key(signature)
        plan = self._plans.get(key)
        if plan is None and isinstance(key, tuple):
            known = [(other, found) for other, found in self._plans.items() if isinstance(other, tuple) and found.choice]
            plan = next((found for other, found in known if covers(other, key)), None)
        if plan is None:
            while len(self._plans) >= MOST_PLANS:
                del self._plans[next(iter(self._plans))]
            plan = self._plans[key] = Planned(kept=frozenset() if KEEP not in self.ways else None)
        self.use(plan)
        self.typical = plan is self._digested and self._plans.get(key) is plan
        return plan

    def use(self, plan: Planned) -> None:
        """Make this plan current: recompute and offload as it says."""
        everything = self.recompute.recomputable
        if RECOMPUTE not in self.ways:
            self.recompute.again = frozenset()
        else:
            self.recompute.again = everything - (plan.kept or frozenset())
        self.recompute.offloaded = plan.offloaded
        self.current = plan

    def spare(self, plan: Planned) -> bool:
        """After a step that ran out of memory: change the plan to take less. False if nothing is left to try."""
        tight = plan.choice is not None
        if tight:
            self.room_nbytes -= self.room_nbytes // 32  # the plan was too tight
        if self.placements_back() or tight:
            pass  # trace again
        elif plan.kept:
            plan.kept = frozenset()
        elif OFFLOAD in self.ways and not plan.offloaded and self.recompute.recomputable:
            plan.offloaded = True
        else:
            return False
        plan.choice, plan.replans = None, 0
        return True

    def never_again(self, layer: int | None, words: str) -> None:
        """Exclude a layer, if one is named, from recomputation: its activations are kept from now on."""
        if layer is not None and KEEP not in self.ways:
            warn(f"{words}, so the layer cannot be recomputed: the engine keeps its activations")
        self.recompute.recomputable -= {layer}
        for plan in self._plans.values():
            plan.choice, plan.replans = None, 0

    def placements_back(self, *, for_good: bool = False) -> bool:
        """Evict placements from the device to the host, as many as fit there. Returns whether any moved. Ranks that do not know
        of each other's placements move none, unless it is `for_good`."""
        store, moved = self.store, False
        if store.sparse and store.ranks.world > 1 and self._on_device is not None and not for_good:
            return False
        room = store.host_room_nbytes
        if store.books.host.now["snapshot"]:
            store.free_host()
        layers = [k for k, placement in enumerate(store.placements) if placement.tier in (DEVICE, STREAMED)]
        for layer in reversed(layers):  # from the last: the next forward needs the first layers first
            weights, *rest = store.placement_nbytes(layer)
            more = weights + (sum(rest) if store.placements[layer].tier == DEVICE else 0)  # a streamed layer has the rest there
            if room is None or store.host_nbytes() + more <= room:
                store.migrate(layer, HOST)
                moved = True
        if moved:
            self._on_device = self._streamed = None  # the next trace shows how many fit
            self.streaming(any(placement.tier == STREAMED for placement in store.placements))
            for plan in self._plans.values():
                plan.choice, plan.replans = None, 0
        return moved

    def saw_update(self, nbytes: int, seconds: float) -> None:
        """Record the rate of a host update; the best measured one replaces the guess. The first is ignored, because it
        touches its memory for the first time. The worker calls this, so it must not change `rates`, which the planner reads."""
        if nbytes and self._updates:
            self._best_update = max(self._best_update, nbytes / seconds)
            self._recent_updates.append(nbytes / seconds)
        self._updates += 1

    def best_rates(self) -> Rates:
        """Rates with the host's best measured update. Without a GPU the link and the device are this host's memory too. A busy
        machine skewed their first measurement equally, so they are scaled alike to preserve their ratio to the host."""
        best, rates = self._best_update, self.rates
        if not best or self.store.device.type == "cuda":
            return replace(rates, host=best) if best else rates
        factor = best / rates.host
        return replace(
            rates, host=best, up=rates.up * factor, down=rates.down * factor, device=rates.device * factor,
            shared=rates.shared * factor,
        )  # fmt: skip

    def usual_rate(self) -> float:
        """Median rate of the host's last few updates."""
        return median([*self._recent_updates]) if self._recent_updates else self.rates.host

    def learn(self, plan: Planned, trace: list[ScheduleStep] | None, residents: Residents) -> None:
        """After a step, with its schedule steps if it was traced."""
        timing = residents.timing
        if trace is not None:
            self._digest(plan, trace, residents.kept_nbytes, timing.best)
        elif timing.settled and timing.whole is not None and plan is self._digested:
            self._look_again(plan, timing.whole)

    def _digest(self, plan: Planned, trace: list[ScheduleStep], kept_nbytes: dict[int, int], seconds: dict[int, float]) -> None:
        """Make a plan from a traced step; layers may move to the device."""
        plan.replans += 1
        if plan.replans > MOST_REPLANS:
            return
        if plan.kept is None or not plan.costs:
            plan.costs = self._costs(kept_nbytes, seconds)
        trace = self._largest(trace)
        again = plan.again = self.recompute.again
        may_keep = plan.kept is None and KEEP in self.ways and RECOMPUTE in self.ways
        keepable = again if may_keep else frozenset[int]()
        costs = [
            replace(self._restricted(k, cost), passable=False, recomputable=k in keepable) for k, cost in enumerate(plan.costs)
        ]
        self.rates = agreed(self._partners, self.best_rates())
        try:
            choice, way = self._choose_with_residuals(trace, costs)
        except FitError:  # the traced step itself did fit, so go on without a schedule
            plan.kept = plan.kept or frozenset()
            return
        if may_keep:
            plan.kept = choice.kept
            if choice.kept:
                return  # the next step traces what keeping them takes
        plan.kept = plan.kept or frozenset()
        plan.looked, self._digested = None, plan
        if self.residuals is not None and way is not None:
            self.residuals.become(way)
        self._take(plan, choice, trace)

    def _choose_with_residuals(self, trace: list[ScheduleStep], costs: list[LayerCost]) -> tuple[Choice, Way | None]:
        """Choose placements together with the residual format that gives the fastest step; of near equals the first."""
        residuals, streamed = self.residuals, self._streamed or frozenset()
        now = [
            replace(cost, placement_nbytes=cost.placement_nbytes + self.store.residual_bytes(k)) for k, cost in enumerate(costs)
        ]
        if residuals is None or len(residuals.ways) == 1 or self._on_device is not None:
            return self._choose(trace, now, self.rates, streamed=streamed), None
        best: tuple[float, Choice, Way] | None = None
        for way in residuals.ways:
            nbytes = [residuals.nbytes(k, way) for k in range(len(costs))]
            on_device = [size if way.place == "device" else 0 for size in nbytes]
            own = [replace(cost, placement_nbytes=cost.placement_nbytes + on_device[k]) for k, cost in enumerate(costs)]
            try:
                choice = self._choose(trace, own, self.rates, streamed=streamed)
            except FitError:
                continue
            crossing = sum(nbytes[k] - on_device[k] for k in choice.device)
            seconds = choice.seconds + crossing * (1 / self.rates.up + 1 / self.rates.down)
            if best is None or seconds < (1 - WORTH_ROUNDING) * best[0]:
                best = (seconds, choice, way)
        if best is None:
            return self._choose(trace, now, self.rates, streamed=streamed), None
        return best[1:]

    def _look_again(self, plan: Planned, compute: tuple[float, float]) -> None:
        """Once the schedule has run a few times, and where copies overlap: if the step waits for host updates, consider
        streaming master weights and states through the device. This measures what streaming costs."""
        if plan.looked == self.checked or plan.choice is None or not self.overlapped or self.store.wire.world > 1:
            return
        plan.looked = self.checked
        now, trace, rates = plan.choice, list(plan.trace), self.best_rates()
        costs = [replace(c, movable=k in now.device, fixed=k in now.device) for k, c in enumerate(plan.costs)]
        try:
            none = self._choose(trace, [replace(cost, passable=False) for cost in costs], rates, compute)
            if not now.streamed and none.seconds < (1 + WORTH_STREAMING) * sum(compute):
                return
            if not rates.shared:
                self.rates = rates = overlapped_updates(rates, self.store)
            some = self._choose(trace, costs, rates, compute)
        except FitError:
            return
        best = some if some.seconds < (1 - WORTH_STREAMING) * none.seconds else none
        if best.streamed != now.streamed:
            self._take(plan, best, trace)

    def _choose(
        self,
        trace: list[ScheduleStep],
        costs: list[LayerCost],
        rates: Rates,
        compute: tuple[float, float] | None = None,
        streamed: frozenset[int] = frozenset(),
    ) -> Choice:
        return choose_placement(
            [
                replace(schedule_step, room_nbytes=self.room_nbytes - self.sending_nbytes - schedule_step.room_nbytes)
                for schedule_step in trace
            ],
            costs,
            rates,
            update_room_nbytes=self.room_nbytes - self.stage_nbytes,
            stages_nbytes=stages_nbytes(self.store.optimizer.states + 1, largest_numel(self.store)),
            world=self.store.wire.world,
            compute=compute,
            checked=self.checked,
            streamed=streamed,
        )

    def _take(self, plan: Planned, choice: Choice, trace: list[ScheduleStep]) -> None:
        """Adopt a choice. If memory runs out here, no step fails, because the step is over; the next one traces again."""
        plan.trace = tuple(trace)
        plan.expected = tuple(schedule_step.needs for schedule_step in trace)
        try:
            self._migrate_all(plan, choice.device, choice.streamed)
            plan.choice = choice
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            self.room_nbytes -= self.room_nbytes // 32
            self.placements_back()
            plan.choice = None

    def _restricted(self, layer: int, cost: LayerCost) -> LayerCost:
        """Once placements are chosen, other batches may only move some back to the host. Ranks of a sparse exchange do not even
        do that, because host and device may round the same update differently, and the replicas would differ."""
        movable = cost.movable and (self._on_device is None or layer in self._on_device) and layer not in (self._streamed or ())
        stays = self.store.sparse and layer in (self._on_device or ())
        return replace(cost, movable=movable, fixed=cost.fixed or stays)

    def _migrate_all(self, plan: Planned, device: frozenset[int], streamed: frozenset[int]) -> None:
        store = self.store
        places = [DEVICE if k in device else STREAMED if k in streamed else HOST for k in range(len(store.placements))]
        moving = [k for k, placement in enumerate(store.placements) if placement.tier not in (DISK, places[k])]
        for layer in moving:  # first those that free device memory
            if store.placements[layer].tier != HOST:
                store.migrate(layer, HOST)
        self.streaming(bool(streamed))
        for layer in moving:
            if places[layer] != HOST:
                store.migrate(layer, places[layer])
        if self._on_device is not None and (device, streamed) != (self._on_device, self._streamed):
            for other in self._plans.values():
                if other is not plan:
                    other.choice, other.replans = None, 0
        self._on_device, self._streamed = device, streamed

    def _costs(self, kept_nbytes: dict[int, int], seconds: dict[int, float]) -> tuple[LayerCost, ...]:
        costs = []
        layers = self.store.table.layers
        rows = [[kept_nbytes.get(k, 0), seconds.get(k, 0.0)] for k in range(len(layers))]
        found = torch.tensor(rows, dtype=torch.float64).view(-1, 2)
        if self._partners.world > 1:
            found = self._partners.every(found).amax(0)
        for k, layer in enumerate(layers):
            trained = self.store.shards.trained_numel(k)
            costs.append(
                LayerCost(
                    nbytes=self.store.nbytes(k),
                    placement_nbytes=self.store.device_placement_nbytes(k) - self.store.residual_bytes(k),  # which may yet change
                    down_nbytes=trained * self.store.dtype_of(k).itemsize * self.store.micro_batches,
                    update_nbytes=int(trained * self.store.optimizer.update_nbytes),
                    kept_nbytes=max(0, int(found[k, 0])),
                    again_seconds=float(found[k, 1]),
                    movable=self.store.placements[k].tier != DISK and layer.numel > 0,
                    fixed=k in self._fixed,
                    passable=self._passable(k),
                )
            )
        return tuple(costs)

    def _passable(self, layer: int) -> bool:
        """Whether a layer's update can be streamed: its masters and states are fp32 in host memory, and nothing else moves."""
        store = self.store
        weights, gradients, rest = store.placement_nbytes(layer)
        fp32 = store.optimizer.state == "fp32" and rest > 2 * weights and not gradients
        whole = store.wire.world == 1 and store.shards.aligned(layer)
        return fp32 and whole and not store.sparse and store.placements[layer].tier in (HOST, STREAMED)

    @property
    def _partners(self) -> Wire:
        """The ranks that plan together: under a plan those that run the same layers. Once a rank that holds the whole model has
        chosen its placements, it plans alone, so that no rank waits for others before a step."""
        whole = self.store.wire.world == 1 and self.store.tiling is None
        alone = self.store.sparse and whole and self._on_device is not None
        return self.store.wire if alone else self._stage or self.store.ranks

    def _largest(self, trace: list[ScheduleStep]) -> list[ScheduleStep]:
        """The trace with the maximum over the ranks of the non-weight memory at each schedule step."""
        wire = self._partners
        if wire.world == 1:
            return trace
        most = wire.every(torch.tensor([schedule_step.room_nbytes for schedule_step in trace])).amax(0).tolist()
        return [replace(schedule_step, room_nbytes=most[k]) for k, schedule_step in enumerate(trace)]

    def _key(self, signature: Signature) -> Signature | bytes:
        """A key that is the same on all ranks: the maximum of every size, if all batches have the same structure."""
        wire = self._partners if self._stage is None else self.store.ranks
        if wire.world == 1:
            return signature
        kinds = repr([(dtype, len(shape)) for dtype, shape in signature])
        digest = int.from_bytes(hashlib.blake2b(kinds.encode(), digest_size=7).digest(), "big")
        sizes = [size for _, shape in signature for size in shape][:MOST_SIZES]
        rows = wire.every(torch.tensor([*self.call, digest, *sizes, *[0] * (MOST_SIZES - len(sizes))]))
        same_calls(rows[:, :2])
        same_settings(rows[:, 2])
        rows = rows[:, 3:]
        if not bool((rows[:, 0] == digest).all()) or len(sizes) == MOST_SIZES:
            return rows.numpy().tobytes()
        largest = iter(rows.amax(0).tolist()[1:])
        return tuple((dtype, tuple(next(largest) for _ in shape)) for dtype, shape in signature)
