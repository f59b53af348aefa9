"""Proves a lowered model symbolically, apart from the code that builds it: every layer's steps are followed over placements.

lifetimes    a step reads only slots that are filled and not freed; at the end of a pass exactly what leaves is left; a move
             that frees its source is the last reader of its bytes
shapes       the factors of every dim multiply to the size of the whole tensor
layouts      an operator gets each operand as its rule and split need it; partial sums go only where they may, and a move starts
             from the placement that the slot has
gradients    every trained weight of a layer is accumulated once in its backward
order        steps name no rank, so all ranks run the same collectives in the same order; `digest` lets ranks compare programs
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from scrimp.capture import PARAMETER
from scrimp.errors import RunError
from scrimp.lower.choice import ChosenLayer
from scrimp.lower.model import Lowered, LoweredLayer
from scrimp.lower.steps import (
    Accumulate,
    Ahead,
    Behind,
    Buffer,
    Call,
    Fetch,
    Free,
    Gather,
    Move,
    Offload,
    Reduce,
    Slot,
    Step,
    Store,
)
from scrimp.lower.steps import filled as fills
from scrimp.lower.steps import read as reads
from scrimp.planner import Placed, common


def check(lowered: Lowered) -> None:
    """Raises `RunError` with the layer and the step that are wrong."""
    done: set[int] = set()
    for layer in lowered.layers:
        for program in (layer.ahead, layer.behind):
            if id(program) not in done:
                done.add(id(program))
                _Pass(lowered, layer, program).run()


def digest(lowered: Lowered) -> str:
    """Equal on two ranks exactly when they run the same steps."""
    found = hashlib.sha256(repr(lowered.mesh).encode())
    for layer in lowered.layers:
        for program in (layer.ahead, layer.behind):
            found.update(repr((layer.path, program.steps)).encode())
    return found.hexdigest()


class _Pass:
    """`now`: the placement of each filled slot."""

    def __init__(self, lowered: Lowered, layer: LoweredLayer, program: Ahead | Behind) -> None:
        self.lowered, self.layer, self.program = lowered, layer, program
        self.chosen: ChosenLayer = layer.chosen
        self.slots: tuple[Slot, ...] = program.slots
        self.accumulated: list[str] = []
        self.where = ""
        given: Iterable[int]
        if isinstance(program, Ahead):
            given = (slot for _, slot in program.inputs)
            self.left = {*program.saved, *(slot for _, slot in program.outputs)}
        else:
            given = (*layer.ahead.saved, *(slot for _, slot in program.tangents))
            self.left = {slot for _, slot in program.gradients}
        self.now: dict[int, Placed] = {slot: self.slots[slot].place for slot in given}

    def run(self) -> None:
        for number, step in enumerate(self.program.steps):
            kind = "forward" if isinstance(self.program, Ahead) else "backward"
            self.where = f"layer {self.layer.path or 'the model'}, {kind}, step {number} ({step})"
            for slot in reads(step):
                self._sure(slot in self.now, f"slot {slot} is not filled, or was freed")
            for slot in fills(step):
                self._sure(slot not in self.now, f"slot {slot} is filled twice")
            self._step(step)
        self.where = f"layer {self.layer.path or 'the model'}, at the end"
        self._sure(self.now.keys() == self.left, f"slots {sorted(self.now.keys() ^ self.left)} are left over, or are missing")
        for slot, place in self.now.items():
            self._sure(place == self.slots[slot].place, f"slot {slot} is {place}, not {self.slots[slot].place}")
        if isinstance(self.program, Behind):
            trained = [name for name, _ in self.chosen.model.graph.gradients if self.chosen.values[name].kind == PARAMETER]
            self._sure(sorted(trained) == sorted(self.accumulated), f"gradients of {self.accumulated}, not of {trained}")

    def _step(self, step: Step) -> None:
        match step:
            case Call():
                self._call(step)
            case Move():
                self._sure(self.now[step.source] == step.before, f"slot {step.source} is {self.now[step.source]}")
                self._sure(not step.after.partial, "a move cannot make a partial sum")
                self._fill(step.target, step.after)
                if step.donate:
                    self._last_reader(step.source)
            case Reduce():
                self._sure(self.now[step.slot] == step.before, f"slot {step.slot} is {self.now[step.slot]}")
                self._sure(bool(step.before.partial), "it is no partial sum")
                self.now[step.slot] = step.before.complete()
            case Gather():
                self._fill(step.target, self.lowered.rest[self.layer.names[step.weight]].use)
            case Buffer():
                self._fill(step.target, self.slots[step.target].place)
                self._sure(not self.now[step.target].axes, "a buffer is whole")
            case Accumulate():
                self.accumulated.append(step.weight)
                self._sure(self.now[step.source] == step.before, f"slot {step.source} is {self.now[step.source]}")
                if step.donate:
                    self._last_reader(step.source)
            case Store():
                self._sure(self.now[step.source] == step.before, f"slot {step.source} is {self.now[step.source]}")
            case Offload() | Fetch():
                self._fill(step.target, self.now[step.source])
            case Free():
                for slot in step.slots:
                    self._sure(slot in self.now, f"slot {slot} is freed twice")
                    del self.now[slot]

    def _call(self, step: Call) -> None:
        chosen = self.chosen.ops[step.op]
        partial = []
        for k, (slot, wanted) in enumerate(zip(step.inputs, chosen.inputs, strict=True)):
            place = self.now[slot]
            if place.partial:
                partial.append(k)
                self._sure(place.partial == tuple(sorted(step.through)), f"input {k} is a partial sum over {place.partial}")
            self._sure(self._alike(place.complete(), wanted), f"input {k} is {place}, it needs {wanted}")
        if partial:
            self._sure(frozenset(partial) in chosen.rule.linear, f"it is not linear in inputs {partial}")
        for made, of_made in zip(step.outputs, chosen.outputs, strict=True):
            if made is not None:
                assert of_made is not None
                self._fill(made, Placed(of_made.dims, tuple(sorted({*of_made.partial, *step.through}))))

    def _fill(self, slot: int, place: Placed) -> None:
        shape = self.chosen.values[self.slots[slot].value].shape
        self._sure(place.shape == shape, f"slot {slot} has factors of {place.shape}, its tensor is {shape}")
        self.now[slot] = place

    def _last_reader(self, slot: int) -> None:
        storage = self.slots[slot].storage
        others = [other for other in self.now if other != slot and self.slots[other].storage == storage]
        self._sure(not others, f"it frees bytes that slots {others} show too")

    def _alike(self, one: Placed, other: Placed) -> bool:
        if one.shape != other.shape:
            return False
        found = common(one, other, self.lowered.mesh)
        return one == other or (found is not None and found[1] == found[2])

    def _sure(self, holds: bool, words: str) -> None:
        if not holds:
            raise RunError(f"{self.where}: {words}")
