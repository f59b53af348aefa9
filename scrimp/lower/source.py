"""Python source of lowered steps: one function for each program, with one line for each step.

    def forward(given, names):
        s0, = given; given.clear()
        s4 = gather(names['qkv.weight'])
        s5 = f7(s4)
        del s4
        ...
        return s9, s12

A slot is a local variable, deleted behind its last use, so that its tensor is freed there. An operator is a direct call of its
torch function where the rank does nothing else; the others call their local function. The text depends on the rank by what its
names are bound to, so that layers with one program share one function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from traceback import walk_tb
from types import CodeType, FrameType
from typing import Any

import torch

from scrimp.lower.choice import ChosenLayer
from scrimp.lower.model import LoweredLayer
from scrimp.lower.moves import made_whole, redistribute
from scrimp.lower.run import Runner, Slots
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
    Step,
    Store,
    described,
)
from scrimp.lower.weights.together import Together
from scrimp.rules import At, localize, on_device, plain_call

Function = Callable[..., tuple[torch.Tensor, ...]]


def given_of(program: Ahead | Behind, front: Ahead) -> tuple[int, ...]:
    """The slots that a program starts from."""
    if isinstance(program, Ahead):
        return tuple(slot for _, slot in program.inputs)
    return (*front.saved, *(slot for _, slot in program.tangents))


def left_of(program: Ahead | Behind) -> tuple[int, ...]:
    """The slots that it leaves."""
    if isinstance(program, Ahead):
        return tuple(dict.fromkeys((*program.saved, *(slot for _, slot in program.outputs))))
    return tuple(dict.fromkeys(slot for _, slot in program.gradients))


Watch = Callable[["Generated", LoweredLayer, Ahead | Behind, int], None]


class Generated(Runner):
    """Runs the generated functions. `sources`: their texts. `steps`: of each function the step of each line. `watch`: called
    before a pass, with the number -1, and after each step but `Free`, with its number; functions without it have no such line."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.sources: list[str] = []
        self.steps: dict[CodeType, tuple[Step | None, ...]] = {}
        self.watch: Watch | None = None
        self._functions: dict[tuple[int, bool], tuple[tuple[int, ...], tuple[int, ...], Function]] = {}

    def phase(self, layer: LoweredLayer, program: Ahead | Behind, slots: Slots) -> None:
        key = (id(program), self.watch is not None)
        if key not in self._functions:
            given, left = given_of(program, layer.ahead), left_of(program)
            self._functions[key] = given, left, self._function(layer.chosen, program, given, left)
        given, left, function = self._functions[key]
        if self.watch is not None:
            self.watch(self, layer, program, -1)
        box = [slots.pop(slot) for slot in given]
        slots.update(zip(left, function(box, layer.names), strict=True))

    def where(self, error: BaseException) -> str | None:
        """The layer, the pass and the operation in which an error was raised, from its traceback; None if outside of all."""
        layer = self.lowered.layers[self.layer - self.lowered.first]
        path = layer.path or "the model itself"
        for frame, line in reversed([*walk_tb(error.__traceback__)]):
            if frame.f_code in (Together.start_gather.__code__, Together.end_sum.__code__):
                return self._beside(frame)
            if frame.f_code in self.steps:
                step = self.steps[frame.f_code][line - 1]
                op = layer.chosen.ops[step.op].op if isinstance(step, Call) else None
                what = "" if step is None else described(step, layer.names) + (f", {op.target}" if op is not None else "")
                return f"layer {path}, {frame.f_code.co_filename.strip('<>').removeprefix('lowered ')}, {what}"
            if frame.f_code in (Runner._arrive.__code__, Runner._complete.__code__):
                what = "sum of gradients that reach one value" if frame.f_code is Runner._arrive.__code__ else "sum of the loss"
                return f"layer {path}, {what}"
        return None

    def _beside(self, frame: FrameType) -> str:
        """Of a move that runs beside operators of this layer or of another one."""
        number, backward = frame.f_locals["of"]
        path = self.lowered.layers[number - self.lowered.first].path or "the model itself"
        if frame.f_code is Together.end_sum.__code__:
            return f"layer {path}, backward, reduction of the gradient of {frame.f_locals['names'][0]}"
        return f"layer {path}, {'backward' if backward else 'forward'}, gather of {frame.f_locals['name']}"

    def _function(self, chosen: ChosenLayer, program: Ahead | Behind, given: tuple[int, ...], left: tuple[int, ...]) -> Function:
        bound: dict[str, Any] = {
            "gather": self.weights.gather, "accumulate": self.weights.accumulate, "buffer": self.weights.buffer,
            "store": self.weights.store, "offload": self.weights.offload, "fetch": self.weights.fetch,
        }  # fmt: skip
        lines = ["def phase(given, names):"]
        if given:
            lines.append(f"    {_names(given)}, = given; given.clear()")
        steps: list[Step | None] = [None] * len(lines)
        bound["watch"] = partial(self._watched, program)
        for number, step in enumerate(program.steps):
            lines += (f"    {line}" for line in self._lines(chosen, step, number, bound))
            if self.watch is not None and not isinstance(step, Free):
                lines.append(f"    watch({number})")
            steps += [step] * (len(lines) - len(steps))
        lines.append(f"    return ({_names(left)},)" if left else "    return ()")
        text = "\n".join(lines) + "\n"
        self.sources.append(text)
        exec(compile(text, f"<lowered {'forward' if isinstance(program, Ahead) else 'backward'}>", "exec"), bound)
        function: Function = bound["phase"]
        self.steps[bound["phase"].__code__] = tuple(steps)
        return function

    def _watched(self, program: Ahead | Behind, number: int) -> None:
        assert self.watch is not None
        self.watch(self, self.lowered.layers[self.layer - self.lowered.first], program, number)

    def _lines(self, chosen: ChosenLayer, step: Step, number: int, bound: dict[str, Any]) -> Iterable[str]:
        match step:
            case Call():
                yield from self._call(chosen, step, number, bound)
            case Move() | Reduce():
                after = step.after if isinstance(step, Move) else step.before.complete()
                source, target = (step.source, step.target) if isinstance(step, Move) else (step.slot, step.slot)
                donate = step.donate if isinstance(step, Move) else True
                order = chosen.values[step.value].order
                bound[f"m{number}"] = partial(
                    redistribute, self.comm, before=step.before, after=after, order=order, donate=donate
                )
                yield f"s{target} = m{number}(s{source})"
            case Gather():
                yield f"s{step.target} = gather(names[{step.weight!r}])"
            case Buffer():
                yield f"s{step.target} = buffer(names[{step.buffer!r}])"
            case Accumulate():
                bound[f"p{number}"] = step.before
                yield f"accumulate(names[{step.weight!r}], s{step.source}, p{number}, donate={step.donate})"
            case Store():
                bound[f"w{number}"] = partial(made_whole, self.comm, before=step.before)
                yield f"store(names[{step.buffer!r}], w{number}(s{step.source}))"
            case Offload():
                yield f"s{step.target} = offload(s{step.source})"
            case Fetch():
                yield f"s{step.target} = fetch(s{step.source})"
            case Free():
                yield f"del {_names(step.slots)}"

    def _call(self, chosen: ChosenLayer, step: Call, number: int, bound: dict[str, Any]) -> Iterable[str]:
        op = chosen.ops[step.op]
        where = (on_device(op.op, str(self.device)), op.rule, dict(op.split), self.comm.mesh, self.comm.rank)
        plain = plain_call(*where)
        if plain is None:
            bound[f"f{number}"] = localize(*where, all_reduce=self.comm.all_reduce, draw=partial(self.draw, step.op))
            text = f"f{number}({_names(step.inputs)})"
        else:
            bound[f"f{number}"] = plain.function

            def argument(value: Any, name: str) -> str:
                if isinstance(value, At):
                    return f"s{step.inputs[value.index]}"
                if isinstance(value, list) and any(isinstance(each, At) for each in value):
                    return f"[{', '.join(argument(each, f'{name}_{k}') for k, each in enumerate(value))}]"
                if isinstance(value, (bool, int, type(None))):
                    return repr(value)
                bound[name] = value
                return name

            arguments = [argument(value, f"a{number}_{k}") for k, value in enumerate(plain.args)]
            arguments += [f"{key}={argument(value, f'a{number}_{key}')}" for key, value in plain.kwargs.items()]
            text = f"f{number}({', '.join(arguments)})"
        several = plain is None or len(step.outputs) > 1 or _is_tuple(op.op.target)
        if not several:
            yield f"s{step.outputs[0]} = {text}" if step.outputs[0] is not None else text
            return
        yield f"t = {text}"
        for k, slot in enumerate(step.outputs):
            if slot is not None:
                yield f"s{slot} = t[{k}]"
        yield "del t"


def _is_tuple(target: str) -> bool:
    """Whether an operator with one output returns it in a tuple or a list: a split into one part."""
    return target.split(".")[1] in ("split", "split_with_sizes", "unbind", "chunk")


def _names(slots: Iterable[int]) -> str:
    return ", ".join(f"s{slot}" for slot in slots)
