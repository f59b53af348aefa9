"""Runs lowered steps one by one: the oracle of the generated source."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from scrimp.lower.model import LoweredLayer
from scrimp.lower.moves import made_whole, redistribute
from scrimp.lower.run import Runner, Slots
from scrimp.lower.steps import Accumulate, Ahead, Behind, Buffer, Call, Fetch, Free, Gather, Move, Offload, Reduce, Step, Store
from scrimp.rules import localize, on_device


class Interpreter(Runner):
    """`before` is called with every step, before it runs."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.before: Callable[[LoweredLayer, Step], None] | None = None
        self._members: dict[tuple[Any, ...], Callable[..., tuple[Any, ...]]] = {}

    def phase(self, layer: LoweredLayer, program: Ahead | Behind, slots: Slots) -> None:
        for step in program.steps:
            if self.before is not None:
                self.before(layer, step)
            self._run(layer, step, slots)

    def _run(self, layer: LoweredLayer, step: Step, slots: Slots) -> None:
        values, names = layer.chosen.values, layer.names
        match step:
            case Call():
                made = self._member(layer, step.op)(*(slots[slot] for slot in step.inputs))
                slots.update({slot: tensor for slot, tensor in zip(step.outputs, made, strict=False) if slot is not None})
            case Move():
                source = slots.pop(step.source) if step.donate else slots[step.source]
                order = values[step.value].order
                slots[step.target] = redistribute(self.comm, source, step.before, step.after, order, donate=step.donate)
            case Reduce():
                complete, order = step.before.complete(), values[step.value].order
                slots[step.slot] = redistribute(self.comm, slots.pop(step.slot), step.before, complete, order, donate=True)
            case Gather():
                slots[step.target] = self.weights.gather(names[step.weight])
            case Buffer():
                slots[step.target] = self.weights.buffer(names[step.buffer])
            case Accumulate():
                source = slots.pop(step.source) if step.donate else slots[step.source]
                self.weights.accumulate(names[step.weight], source, step.before, donate=step.donate)
            case Store():
                self.weights.store(names[step.buffer], made_whole(self.comm, slots[step.source], step.before))
            case Offload():
                slots[step.target] = self.weights.offload(slots[step.source])
            case Fetch():
                slots[step.target] = self.weights.fetch(slots[step.source])
            case Free():
                for slot in step.slots:
                    slots.pop(slot, None)

    def _member(self, layer: LoweredLayer, index: int) -> Callable[..., tuple[Any, ...]]:
        key = (*layer.chosen.key, index)
        if key not in self._members:
            chosen = layer.chosen.ops[index]
            self._members[key] = localize(
                on_device(chosen.op, str(self.device)), chosen.rule, dict(chosen.split), self.comm.mesh, self.comm.rank,
                all_reduce=self.comm.all_reduce, draw=partial(self.draw, index),
            )  # fmt: skip
        return self._members[key]
