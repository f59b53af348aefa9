"""The steps of a lowered layer: frozen data without torch.

A slot holds one local tensor. The steps of a phase run in order; a slot is filled once. `Placed` says which part of the whole
tensor a slot holds on each rank, so that one program serves all ranks of a mesh: a rank enters by its coordinates alone.

    Call     an operator on local tensors
    Move     a copy of a slot in another placement
    Reduce   a partial sum becomes whole, in place
    Gather   a weight, from its shards at rest to its placement in use
    Buffer   a buffer of the model, whole
    Accumulate     a weight's gradient, to where it rests
    Store    a buffer's new value, into the buffer
    Offload  a slot's bytes go to the host
    Fetch    and come back into another slot
    Free     slots whose last use is behind
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from scrimp.planner import Placed

FORWARD, AGAIN, BACKWARD = "forward", "again", "backward"


@dataclass(frozen=True, kw_only=True)
class Call:
    """`op`: index in the layer's graph. `through`: axes along which its inputs are partial sums that it passes on."""

    op: int
    inputs: tuple[int, ...]
    outputs: tuple[int | None, ...]
    through: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Move:
    """`donate`: the source is not used afterwards, so that the move may free it as soon as it is packed."""

    value: str
    source: int
    target: int
    before: Placed
    after: Placed
    donate: bool = False


@dataclass(frozen=True, kw_only=True)
class Reduce:
    value: str
    slot: int
    before: Placed


@dataclass(frozen=True, kw_only=True)
class Gather:
    weight: str
    target: int


@dataclass(frozen=True, kw_only=True)
class Buffer:
    buffer: str
    target: int


@dataclass(frozen=True, kw_only=True)
class Accumulate:
    """`donate`: as in `Move`."""

    weight: str
    value: str
    source: int
    before: Placed
    donate: bool = False


@dataclass(frozen=True, kw_only=True)
class Store:
    buffer: str
    value: str
    source: int
    before: Placed


@dataclass(frozen=True, kw_only=True)
class Offload:
    source: int
    target: int


@dataclass(frozen=True, kw_only=True)
class Fetch:
    source: int
    target: int


@dataclass(frozen=True, kw_only=True)
class Free:
    slots: tuple[int, ...]


Step = Call | Move | Reduce | Gather | Buffer | Accumulate | Store | Offload | Fetch | Free


def read(step: Step) -> tuple[int, ...]:
    """The slots that a step reads."""
    match step:
        case Call(inputs=inputs):
            return inputs
        case (
            Move(source=source) | Accumulate(source=source) | Store(source=source) | Offload(source=source) | Fetch(source=source)
        ):
            return (source,)
        case Reduce(slot=slot):
            return (slot,)
    return ()


def filled(step: Step) -> tuple[int, ...]:
    """The slots that a step fills."""
    match step:
        case Call(outputs=outputs):
            return tuple(slot for slot in outputs if slot is not None)
        case Move(target=target) | Gather(target=target) | Buffer(target=target) | Offload(target=target) | Fetch(target=target):
            return (target,)
    return ()


def described(step: Step, names: Mapping[str, str]) -> str:
    """A step that may communicate, for messages. `names`: the model's name of each parameter and buffer of the layer."""
    match step:
        case Move():
            return f"move of {step.value!r} {step.before} -> {step.after}"
        case Reduce():
            return f"sum of {step.value!r} over {','.join(step.before.partial)}"
        case Gather():
            return f"gather of {names[step.weight]}"
        case Accumulate():
            return f"reduction of the gradient of {names[step.weight]}"
        case Store():
            return f"update of the buffer {names[step.buffer]}"
        case Call():
            return f"operator {step.op}"
    return type(step).__name__.lower()


@dataclass(frozen=True, kw_only=True)
class Slot:
    """`value`: of which this is the local tensor; `storage`: the slot that owns the bytes, itself unless it is a view."""

    value: str
    place: Placed
    storage: int


@dataclass(frozen=True, kw_only=True)
class Ahead:
    """A layer's forward. `inputs`: slots of the layer's inputs from other layers and the batch, by name. `outputs`: slots that
    leave. `saved`: slots that the backward reads; `hosted`: those of them that lie on the host."""

    steps: tuple[Step, ...]
    inputs: tuple[tuple[str, int], ...]
    outputs: tuple[tuple[str, int], ...]
    saved: tuple[int, ...]
    hosted: tuple[int, ...]
    slots: tuple[Slot, ...]


@dataclass(frozen=True, kw_only=True)
class Behind:
    """A layer's backward, which begins with what runs again. `tangents`: slots of the gradients that arrive, by output;
    `gradients`: slots of those that leave, by input. Slots are numbered on from the forward's."""

    steps: tuple[Step, ...]
    tangents: tuple[tuple[str, int], ...]
    gradients: tuple[tuple[str, int], ...]
    slots: tuple[Slot, ...]
