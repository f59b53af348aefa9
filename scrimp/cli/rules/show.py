"""`scrimp rules`: prints the operators with rules, the check of a rule, and a discovered rule with its evidence."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.columns import Columns

from scrimp.capture import Op, Value
from scrimp.cli._end import UsageError, typed
from scrimp.cli.rules.read import check_modules, literals_of, shapes_of
from scrimp.rules import (
    Example,
    Proof,
    Rule,
    Tie,
    bind,
    discover,
    example,
    grown,
    known_targets,
    literal,
    prove,
    refuses,
    rule_of,
    target_of,
    written,
)

if TYPE_CHECKING:
    from rich.console import Console

_LARGER = 3


def show(console: Console) -> None:
    known = sorted(known_targets())
    console.print(Columns(known, padding=(0, 2)))
    console.print(
        f"\n{len(known)} operators, and all that torch marks as pointwise. Operators without a rule run unsharded: "
        "scrimp rules discover OP may find one.",
        soft_wrap=True,
    )


def check(console: Console, name: str, shapes: str | None, settings: Sequence[str], load: Sequence[str]) -> bool:
    """Whether all checks pass."""
    op, values = _asked(name, shapes, settings, load)
    rule = rule_of(op, values)
    if rule is None:
        raise UsageError(
            f"{op.target} has no rule for {_call(op, values)}; scrimp rules discover {op.target} may find one, scrimp rules "
            "lists those that have"
        )
    console.print(_call(op, values), soft_wrap=True)
    console.print(_factors(rule), soft_wrap=True)
    try:
        proof = prove(op, values, rule)
    except Exception as error:  # operators raise many kinds of errors: the unsharded call fails
        raise UsageError(f"{op.target} cannot be tried on random numbers: {str(error).partition(chr(10))[0]}") from error
    for fault in proof.faults:
        console.print(f"wrong: {fault}", style="red", soft_wrap=True)
    console.print(f"{'wrong' if proof.faults else 'right'} {_surety(proof)}", soft_wrap=True)
    return not proof.faults


def find(console: Console, name: str, shapes: str | None, settings: Sequence[str], load: Sequence[str]) -> bool:
    """Whether a rule was found."""
    op, values = _asked(name, shapes, settings, load)
    _can_be_tried(op, values)
    tried: list[tuple[Tie, str | None]] = []
    console.print(_call(op, values), soft_wrap=True)
    line = discover(op, values, lambda tie, kind: tried.append((tie, kind)))
    for tie, kind in tried:
        if kind is not None:
            console.print(f"  {_tied(op, values, tie)}: {_KINDS[kind]}", soft_wrap=True)
    console.print(f"tried {len(tried)} ways to equate dims of one size", soft_wrap=True)
    if line is None:
        console.print(
            "no dim may be split: neither concatenated nor summed parts equal the unsharded result. Sizes that more "
            "devices divide, or other literals, may do better (--shapes, --set)",
            soft_wrap=True,
        )
        return False
    for words in _how_sure((op, values), line):
        console.print(words, soft_wrap=True)
    if rule_of(op, values) is not None:
        console.print("it has a rule already, which the planner uses", soft_wrap=True)
    console.print(f"\n{line}", soft_wrap=True)
    return True


_KINDS = {"free": "may be split", "sum": "may be split, and leaves a partial sum"}


def _how_sure(made: Example, line: str) -> list[str]:
    """Checks the parsed rule in every split, at the sizes it was found with and at larger ones."""
    ((_, text),) = ast.literal_eval("{" + line + "}").items()
    said = []
    larger = grown(made, _LARGER)
    for words, each in (("these sizes", made), (f"sizes {_LARGER} times larger", larger)):
        if each is None:
            said.append(f"{words}: not tried, the operator does not take them with these literals")
            continue
        call = bind(*each)
        rule = None if call is None else written(text)(call)
        if call is None or rule is None or (len(rule.inputs), len(rule.outputs)) != (len(call.shapes), len(call.made)):
            said.append(f"{words}: the rule is not for them")
            continue
        proof = prove(*each, rule, seeds=(0, 1, 2))
        said.append(f"{words}: {'wrong' if proof.faults else 'right'} {_surety(proof)}")
        said += [f"  {fault}" for fault in proof.faults[:3]]
    return said


def _surety(proof: Proof) -> str:
    meshes = " ".join(proof.meshes) or "-"
    return f"in {proof.ways} ways to split it, with {proof.seeds} draws of numbers each, on the meshes {meshes}"


def _asked(name: str, shapes: str | None, settings: Sequence[str], load: Sequence[str]) -> Example:
    check_modules(load)
    for module in load:
        sys.path.insert(0, "")
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise UsageError(f"--load {module}: {error}") from error
        except Exception as error:  # importing a module can raise anything
            raise UsageError(f"--load {module}: {type(error).__name__}: {error}") from error
        except SystemExit as error:
            raise UsageError(f"--load {module}: importing it calls sys.exit({error.code!r})") from error
        finally:
            sys.path.remove("")
    with typed():
        return example(target_of(name), shapes_of(shapes), literals_of(settings))


def _can_be_tried(op: Op, values: dict[str, Value]) -> None:
    """The operator must run on random numbers, and be deterministic."""
    trouble = refuses(op, values)
    if trouble is not None:
        raise UsageError(f"{op.target} cannot be tried on random numbers: {trouble}")


def _call(op: Op, values: dict[str, Value]) -> str:
    """ "aten.mm.default(4x6, 6x10) -> 4x10"."""
    call = bind(op)
    assert call is not None
    literals = [f"{name}={literal(each)}" for name, each in call.arguments.items() if _is_literal(each)]
    before, after = ([_size(values[name]) for name in names if name is not None] for names in (op.inputs, op.outputs))
    return f"{op.target}({', '.join([*before, *literals])}) -> {', '.join(after)}"


def _is_literal(argument: Any) -> bool:
    return isinstance(argument, (int, float, str)) or (isinstance(argument, tuple) and all(map(_is_literal, argument)))


def _size(value: Value) -> str:
    sizes = "x".join(map(str, value.shape)) or "scalar"
    return sizes if value.dtype.startswith(("float", "bfloat")) else f"{sizes}:{value.dtype}"


def _tied(op: Op, values: dict[str, Value], tie: Tie) -> str:
    names = [f"input {k}" for k in range(len(op.inputs))] + [f"output {k}" for k in range(len(op.outputs))]
    held = [*op.inputs, *(name for name in op.outputs if name is not None)]
    dims = [f"dim {at} of {name}" for name, at in zip(names, tie, strict=True) if at is not None]
    size = next(values[name].shape[at] for name, at in zip(held, tie, strict=True) if at is not None)
    return f"{', '.join(dims)} (size {size})"


def _factors(rule: Rule) -> str:
    return "factors " + ", ".join(f"{each.size} {each.kind}{', as a range' if each.ranged else ''}" for each in rule.factors)
