"""Lowers one layer: a choice for each operator becomes the steps of its forward and of its backward.

A value is current in the slot in which it was made. An operator that needs it in another placement gets a copy by a move, which
all operators of its group share within a phase. Storages are saved for the backward, views are not: the backward makes a view
again where its base was moved, gathered or offloaded in between, because the view would keep that copy alive.

    forward    all forward operators; what the backward reads is saved as the group's policy says
    again      what a group recomputes, and what that needs, just before the layer's backward
    backward   all backward operators; a weight's gradient is accumulated as soon as it is made
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from scrimp.capture import BORDER, BUFFER, MADE, PARAMETER
from scrimp.lower.choice import ChosenLayer
from scrimp.lower.steps import (
    AGAIN,
    BACKWARD,
    FORWARD,
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
    filled,
    read,
)
from scrimp.planner import KEEP, OFFLOAD, RECOMPUTE, Placed, common, passed_on


def same(one: Placed, other: Placed, layer: ChosenLayer) -> bool:
    """Whether every rank holds the same part."""
    if one == other:
        return True
    found = common(one, other, layer.mesh)
    return found is not None and found[1] == found[2]


class _Phases:
    """Builds steps with numbered slots. `current`: the slot of each value that is at hand."""

    def __init__(self, layer: ChosenLayer, weights: Mapping[str, Placed], slots: Iterable[Slot] = ()) -> None:
        self.layer, self.weights = layer, weights
        self.slots = [*slots]
        self.steps: list[Step] = []
        self.current: dict[str, int] = {}
        self.hosted: dict[str, int] = {}  # values whose bytes lie on the host, by slot there
        self.copies: dict[tuple[str, Placed, int, str], int] = {}
        self.gathered: dict[tuple[str, int, str], int] = {}

    def slot(self, value: str, place: Placed, storage: int | None = None) -> int:
        self.slots.append(Slot(value=value, place=place, storage=len(self.slots) if storage is None else storage))
        return len(self.slots) - 1

    def call(self, index: int, phase: str) -> None:
        """One operator, with what its inputs need before it."""
        chosen, values = self.layer.ops[index], self.layer.values
        own = [self._own(name, chosen.group) for name in chosen.op.inputs]
        parts = [
            self.slots[self.find(name, chosen.group, phase)].place.partial if mine else ()
            for name, mine in zip(chosen.op.inputs, own, strict=True)
        ]
        through = passed_on(chosen.rule.linear, parts)
        inputs = []
        for name, place, mine in zip(chosen.op.inputs, chosen.inputs, own, strict=True):
            held = self.slots[self.find(name, chosen.group, phase)].place
            if mine and held.partial and set(held.partial) <= set(through):
                place = Placed(place.dims, held.partial)
            inputs.append(self.as_needed(name, place, chosen.group, phase))
        outputs: list[int | None] = []
        for made, of_made in zip(chosen.op.outputs, chosen.outputs, strict=True):
            if made is None or of_made is None:
                outputs.append(None)
                continue
            base = None
            if values[made].storage != made:  # a view of its first input
                base = self.slots[inputs[0]].storage
            slot = self.slot(made, Placed(of_made.dims, tuple(sorted({*of_made.partial, *through}))), base)
            outputs.append(slot)
            self.current[made] = slot
        self.steps.append(Call(op=index, inputs=tuple(inputs), outputs=tuple(outputs), through=through))

    def forget_copies(self) -> None:
        """At the end of a phase: views of moved copies are made anew in the next one."""
        moved = {step.target for step in self.steps if isinstance(step, Move)}
        self.current = {name: slot for name, slot in self.current.items() if self.slots[slot].storage not in moved}

    def _own(self, name: str, group: int) -> bool:
        return self.layer.model.makers.get(name) == group

    def find(self, name: str, group: int, phase: str) -> int:
        """The slot in which a value is at hand; brings it there if need be."""
        if name in self.current:
            return self.current[name]
        value = self.layer.values[name]
        if value.kind in (PARAMETER, BUFFER):
            key = (name, group, phase)
            if key not in self.gathered:
                self.gathered[key] = slot = self.slot(name, self.weights[name])
                self.steps.append(
                    Gather(weight=name, target=slot) if value.kind == PARAMETER else Buffer(buffer=name, target=slot)
                )
            return self.gathered[key]
        if name in self.hosted:
            self.current[name] = slot = self.slot(name, self.slots[self.hosted[name]].place)
            self.steps.append(Fetch(source=self.hosted[name], target=slot))
            return slot
        if value.kind == MADE and value.storage != name:
            if self.layer.values[value.storage].kind == PARAMETER:
                # A view of a gathered weight belongs to its group and phase, as the weight does.
                key = (name, group, phase)
                if key not in self.gathered:
                    self.call(self.layer.producer[name], phase)
                    self.gathered[key] = self.current.pop(name)
                return self.gathered[key]
            self.call(self.layer.producer[name], phase)
            return self.current[name]
        raise LookupError(f"{name} is not at hand in the {phase}")

    def as_needed(self, name: str, place: Placed, group: int, phase: str) -> int:
        found = self.find(name, group, phase)
        held = self.slots[found].place
        if same(held, place, self.layer):
            return found
        key = (name, place, group, phase)
        if key in self.copies:
            return self.copies[key]
        if held.partial and same(held.complete(), place, self.layer) and self._alone(name, found):
            self.slots[found] = replace(self.slots[found], place=place)
            self.steps.append(Reduce(value=name, slot=found, before=held))
            return found
        self.copies[key] = slot = self.slot(name, place)
        self.steps.append(Move(value=name, source=found, target=slot, before=held, after=place))
        return slot

    def _alone(self, name: str, slot: int) -> bool:
        """Whether a partial sum may be completed in place: it was made here, and no other value shows its bytes."""
        value = self.layer.values[name]
        if value.kind != MADE or self.current.get(name) != slot or self.slots[slot].storage != slot:
            return False
        group = self.layer.model.makers[name]
        if any(each.value != name for each in self.slots if each.storage == slot):
            return False
        # Operators of its own group that pass partial sums on must still find one.
        ran = {step.op for step in self.steps if isinstance(step, Call)}
        for index in self.layer.model.reads.get(value.storage, ()):
            chosen = self.layer.ops[index]
            if index not in ran and chosen.group == group and name in chosen.op.inputs:
                own = [each == name for each in chosen.op.inputs]
                if passed_on(chosen.rule.linear, [("*",) if mine else () for mine in own]):
                    return False
        return True


def ahead(layer: ChosenLayer, borders: Mapping[str, Placed], weights: Mapping[str, Placed]) -> Ahead:
    """The forward. `borders`: placements in which the layer's inputs arrive; `weights`: of weights in use, and of buffers."""
    model = layer.model
    phases = _Phases(layer, weights)
    inputs = tuple((name, phases.slot(name, borders[name])) for name in model.borders)
    phases.current.update(inputs)
    for index in range(model.forward_ops):
        phases.call(index, FORWARD)
    for buffer, new in model.graph.updates:
        slot = phases.find(new, -1, FORWARD)
        phases.steps.append(Store(buffer=buffer, value=new, source=slot, before=phases.slots[slot].place))
    outputs = tuple((name, phases.find(name, -1, FORWARD)) for name in model.graph.outputs)
    values, offloaded = _needs(layer, phases)
    saved = [phases.current[name] for name in values]
    hosted: dict[int, int] = {}
    steps = [*phases.steps]
    for name in offloaded:
        slot = phases.current[name]
        hosted[slot] = phases.slot(name, phases.slots[slot].place)
    for source, target in hosted.items():
        last = max(
            k
            for k, step in enumerate(steps)
            if any(phases.slots[each].storage == source for each in (*read(step), *filled(step)))
        )
        steps.insert(last + 1, Offload(source=source, target=target))
    saved += hosted.values()
    kept = {*saved, *(slot for _, slot in outputs)}
    given = {slot for _, slot in inputs}
    return Ahead(
        steps=_with_frees(steps, phases.slots, kept, given),
        inputs=inputs, outputs=outputs, saved=tuple(dict.fromkeys(saved)), hosted=tuple(hosted.values()),
        slots=tuple(phases.slots),
    )  # fmt: skip


def _needs(layer: ChosenLayer, phases: _Phases) -> tuple[list[str], list[str]]:
    """After the forward is built: follows what the backward reads to the values that are kept for it, and that are offloaded."""
    model, values = layer.model, layer.values
    leaving = {values[name].storage for name in model.graph.outputs}
    kept: dict[str, None] = {}
    offloaded: dict[str, None] = {}
    seen: set[str] = set()
    gradients = [name for _, name in model.graph.gradients]
    waiting = [*(name for op in model.graph.ops[model.forward_ops :] for name in op.inputs), *gradients]
    while waiting:
        name = waiting.pop()
        if name in seen or name not in values or values[name].kind in (PARAMETER, BUFFER):
            continue
        seen.add(name)
        value = values[name]
        if value.kind == BORDER:
            kept[name] = None
            continue
        if value.kind != MADE or layer.producer[name] >= model.forward_ops:
            continue
        root = values[value.storage]
        policy = KEEP
        if root.kind == MADE and root.name not in leaving:
            policy = layer.groups[model.makers[root.name]].saved
        if root.name == name:
            if policy == RECOMPUTE:
                waiting += model.graph.ops[layer.producer[name]].inputs
            else:
                (offloaded if policy == OFFLOAD else kept)[name] = None
            continue
        slot = phases.current.get(name)
        at_root = (
            slot is not None
            and root.name in phases.current
            and phases.slots[slot].storage == phases.slots[phases.current[root.name]].storage
        )
        if policy == KEEP and root.kind != PARAMETER and at_root:
            kept[name] = None  # a view of what is kept takes no bytes
        else:
            waiting += model.graph.ops[layer.producer[name]].inputs
    return [*kept], [*offloaded]


def behind(layer: ChosenLayer, front: Ahead, tangents: Mapping[str, Placed], weights: Mapping[str, Placed]) -> Behind:
    """The backward. `tangents`: placements in which gradients of the outputs arrive, by output."""
    model = layer.model
    phases = _Phases(layer, weights, front.slots)
    for slot in front.saved:
        (phases.hosted if slot in front.hosted else phases.current)[front.slots[slot].value] = slot
    incoming = dict(model.graph.tangents)
    arriving = tuple((output, phases.slot(incoming[output], place)) for output, place in tangents.items())
    phases.current.update({incoming[output]: slot for output, slot in arriving})
    for index in _again(layer, front):
        phases.call(index, AGAIN)
    phases.forget_copies()
    by_value: dict[str, list[str]] = {}
    for name, gradient in model.graph.gradients:
        if layer.values[name].kind == PARAMETER:
            by_value.setdefault(gradient, []).append(name)

    def accumulate(gradient: str) -> None:
        for name in by_value.pop(gradient, ()):
            slot = phases.find(gradient, -1, BACKWARD)
            phases.steps.append(Accumulate(weight=name, value=gradient, source=slot, before=phases.slots[slot].place))

    for index in range(model.forward_ops, len(model.graph.ops)):
        phases.call(index, BACKWARD)
        for made in model.graph.ops[index].outputs:
            if made is not None:
                accumulate(made)
    for gradient in [*by_value]:
        accumulate(gradient)
    leaving = tuple(
        (name, phases.find(gradient, -1, BACKWARD))
        for name, gradient in model.graph.gradients
        if layer.values[name].kind == BORDER
    )
    kept, given = {slot for _, slot in leaving}, {slot for _, slot in arriving}
    outside = {front.slots[slot].storage for _, slot in (*front.inputs, *front.outputs)}
    own = {storage for slot in front.saved if (storage := front.slots[slot].storage) not in outside and slot not in front.hosted}
    steps = _with_frees(phases.steps, phases.slots, kept, given | {*front.saved}, own)
    return Behind(steps=steps, tangents=arriving, gradients=leaving, slots=tuple(phases.slots))


def _again(layer: ChosenLayer, front: Ahead) -> tuple[int, ...]:
    """The operators that run again: those whose results the backward reads, and which were not saved."""
    model, values = layer.model, layer.values
    there = {front.slots[slot].value for slot in front.saved}
    found: set[int] = set()
    waiting = [name for op in model.graph.ops[model.forward_ops :] for name in op.inputs]
    waiting += [name for _, name in model.graph.gradients]
    seen: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name in seen or name in there or values[name].kind != MADE or layer.producer[name] >= model.forward_ops:
            continue
        seen.add(name)
        if values[name].storage == name:
            found.add(layer.producer[name])
        waiting += model.graph.ops[layer.producer[name]].inputs
    return tuple(sorted(found))


def _with_frees(
    steps: list[Step], slots: list[Slot], kept: set[int], given: set[int], own: Collection[int] = ()
) -> tuple[Step, ...]:
    """The same steps, with a `Free` behind the last use of each slot, and moves that may consume their source marked so. `given`:
    slots that come from outside; `own`: storages among them that nobody else holds."""
    last: dict[int, int] = {}
    for k, step in enumerate(steps):
        for slot in (*filled(step), *read(step)):
            last[slot] = k
    made = {*own, *(slot for step in steps for slot in filled(step) if not isinstance(step, (Gather, Buffer)))}
    found: list[Step] = []
    unread = tuple(sorted(slot for slot in given if slot not in last and slot not in kept))
    if unread:
        found.append(Free(slots=unread))
    for k, step in enumerate(steps):
        gone = tuple(sorted({slot for slot in (*read(step), *filled(step)) if last[slot] == k and slot not in kept}))
        if isinstance(step, (Move, Accumulate)) and step.source in gone:
            storage = slots[step.source].storage
            alive = any(
                slots[slot].storage == storage and slot != step.source and (slot in kept or last.get(slot, -1) > k)
                for slot in range(len(slots))
            )
            if not alive and storage in made:
                step = replace(step, donate=True)
        found.append(step)
        if gone:
            found.append(Free(slots=gone))
    return tuple(found)
