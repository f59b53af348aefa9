"""Predicted seconds of the points of a rehearsal: by the rates of the plan's cluster, as in the plan."""

from __future__ import annotations

from typing import Any

from scrimp.cluster import Cluster
from scrimp.engine import LoneRank
from scrimp.lower import (
    Accumulate,
    Ahead,
    Behind,
    Call,
    Fetch,
    Free,
    Gather,
    LoweredLayer,
    Move,
    Offload,
    Reduce,
    Store,
)  # fmt: skip
from scrimp.move import ITEMSIZE
from scrimp.planner import UPDATE_NBYTES, class_of, work_of
from scrimp.rehearsal.clock import OTHER, Clock

OFFLOAD, UPDATE = "offload", "update"
MOVES = (Accumulate, Gather, Move, Reduce, Store)


class TimedPoints:
    """Tells a clock of each point of a step, with its predicted seconds."""

    def __init__(self, clock: Clock, cluster: Cluster, lone: LoneRank) -> None:
        self._clock, self._cluster, self._lone = clock, cluster, lone
        self._mesh = lone.program.plan.mesh
        self._sizes = dict(self._mesh.axes)
        self._known: dict[tuple[int, int], tuple[float, str, str]] = {}
        self._paths: dict[int, str] = {}  # of the first layer of each program

    def begin(self) -> None:
        self._clock.begin()

    def watch(self, _: object, layer: LoweredLayer, program: Ahead | Behind, number: int) -> None:
        key = id(program), number
        if key not in self._known:
            self._known[key] = self._predicted(layer, program, number)
        seconds, where, operators = self._known[key]
        if number < 0:
            self._clock.begins(where)
        elif isinstance(program.steps[number], MOVES):
            self._clock.packed()
        else:
            self._clock.ran(seconds, where, operators)
        following = next((step for step in program.steps[number + 1 :] if not isinstance(step, Free)), None)
        if isinstance(following, MOVES):
            self._clock.packs()

    def end(self, name: str) -> None:
        """Of a point that is no step of a program: what follows the backward, and the update."""
        self._clock.ran(self._update_seconds() if name == UPDATE else 0.0, name, UPDATE if name == UPDATE else OTHER)
        if name != UPDATE:
            self._clock.begins(UPDATE)

    def _predicted(self, layer: LoweredLayer, program: Ahead | Behind, number: int) -> tuple[float, str, str]:
        path = self._paths.setdefault(id(program), layer.path or "the model itself")
        where = f"{path}, {'forward' if isinstance(program, Ahead) else 'backward'}"
        step = program.steps[number] if number >= 0 else None
        if isinstance(step, (Offload, Fetch)):
            slots = (*layer.ahead.slots, *(() if isinstance(program, Ahead) else program.slots))
            slot = slots[step.source]
            nbytes = slot.place.numel(self._sizes) * ITEMSIZE[layer.chosen.values[slot.value].dtype]
            return nbytes / self._hardware.host_rate, where, OFFLOAD
        if not isinstance(step, Call):
            return 0.0, where, OTHER
        chosen = layer.chosen.ops[step.op]
        inside = {atom for dims in (*chosen.rule.inputs, *chosen.rule.outputs) for dim in dims or () for atom in dim}
        split_over = [axis for atom, axes in chosen.split if atom in inside for axis in axes]
        parts = work_of(
            chosen.op, layer.chosen.values, chosen.inputs, chosen.outputs, split_over, self._sizes, chosen.traffic_nbytes
        )  # fmt: skip
        seconds = sum(self._cluster.compute_seconds(each.flops, each.nbytes, each.dtype, each.operators) for each in parts)
        return seconds, where, class_of(chosen.op, layer.chosen.values) if parts else "views"

    @property
    def _hardware(self) -> Any:
        return self._cluster.hardware

    def _update_seconds(self) -> float:
        rest = self._lone.program.part.rest.values()
        numel = sum(each.numel(each.states, self._mesh) for each in rest if each.trained)
        return numel * UPDATE_NBYTES / float(self._hardware.memory_rate)
