"""Makes calls of operators to check rules on, from torch's schemas: with given shapes and literals, or with the first of many
that the operator accepts."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from itertools import islice, product
from typing import Any

import torch

from scrimp.capture import BORDER, MADE, Op, Ref, Value
from scrimp.errors import ScrimpError
from scrimp.rules.core.schema_private import Argument, Schema, all_targets, schema
from scrimp.rules.ops.registry import known_targets

Shape = tuple[tuple[int, ...], str]  # sizes, and the dtype
Example = tuple[Op, dict[str, Value]]

# Distinct sizes distinguish dims; the candidates cover matmuls, vectors, batches and images.
_SHAPES = ((4, 6), (6, 10), (2, 4, 6), (2, 6, 10), (6,), (4,), (10,), (4, 10), (2, 4, 6, 6), ())
_MOST_CALLS = 20_000
_FLOAT, _INT, _BOOL = "float32", "int64", "bool"
_INDICES = ("index", "indices", "target", "labels", "offsets")
_MASKS = ("mask", "condition")
_LITERALS: dict[str, tuple[Any, ...]] = {
    "int": (1, 2, 0),
    "number": (2.0,),
    "float": (0.5,),
    "bool": (False,),
    "str": ("mean",),
    "List[int]": ((1,), (6,), (4, 6), (2, 2), (0, 1)),
    "List[float]": ((2.0, 2.0),),
    "List[bool]": ((True, True, True),),
}


def target_of(name: str) -> str:
    """Resolves "aten.mm.default", "aten.mm" or "mm" to "aten.mm.default"; raises an error that names the nearest if there is
    none."""
    ways = (name, f"{name}.default", f"aten.{name}", f"aten.{name}.default")
    for each in ways:
        found = schema(each)
        if found is not None and any("Tensor" in argument.kind for argument in found.arguments):
            return each
    known = [*known_targets(), *all_targets()]
    near = get_close_matches(name if name.count(".") > 1 else f"aten.{name.removeprefix('aten.')}.default", known, 8, 0.75)
    family = [each for each in known if each.startswith((f"{name}.", f"aten.{name}."))]
    listed = ", ".join([*dict.fromkeys([*sorted(family), *near])][:6])
    way_out = "write it as aten.addmm.default; for one of your own, --load the module that has it"
    raise ScrimpError(f"torch has no operator '{name}'; {f'there are {listed}' if listed else way_out}")


def example(target: str, shapes: Sequence[Shape] = (), literals: Mapping[str, Any] | None = None) -> Example:
    """A call of an operator. `shapes`: of its tensors in order; by default they are searched, as are literals without a default
    that are not given."""
    found, given = schema(target), dict(literals or {})
    assert found is not None, target
    names = [each.name for each in found.arguments]
    unknown = [name for name in given if name not in names]
    if unknown:
        raise ScrimpError(f"{target} has no argument {', '.join(unknown)}; it has {', '.join(names)}")
    if found.writes:
        raise ScrimpError(f"{target} writes into its operands: captured graphs have none of these, so it needs no rule")
    why = ""  # the reason of the first failure
    for arguments in islice(_candidates(found, shapes, given), _MOST_CALLS):
        try:
            made = _made(target, found, arguments)
        except (RuntimeError, ValueError, IndexError, TypeError, NotImplementedError, AssertionError) as error:
            why = why or str(error).partition("\n")[0] or type(error).__name__
            continue
        if made is not None:
            return made
        why = why or "it returns no tensors"
    wanted = ", ".join(f"{each.name}: {each.kind}" for each in found.arguments if each.needed)
    if shapes:
        taken = ",".join("x".join(map(str, shape)) or "scalar" for shape, _ in shapes)
        raise ScrimpError(f"{target} does not take the shapes {taken} ({why}); it needs {wanted}: give other --shapes, or --set")
    raise ScrimpError(
        f"no arguments were found that {target} takes ({why}); it needs {wanted}: give --shapes, such as 4x6,6x8, and literals "
        "by --set, such as --set dim=1"
    )


def grown(made: Example, times: int) -> Example | None:
    """The same call with every size so many times larger; None if the operator rejects it, as where literals hold sizes."""
    op, values = made
    found = schema(op.target)
    assert found is not None
    arguments = dict(zip((each.name for each in found.arguments), op.args, strict=False)) | dict(op.kwargs)

    def larger(argument: Any) -> Any:
        if isinstance(argument, Ref):
            value = values[argument.name]
            return tuple(size * times if size > 1 else size for size in value.shape), value.dtype
        return [larger(each) for each in argument] if isinstance(argument, tuple) and _has_tensors(argument) else argument

    try:
        return _made(op.target, found, {name: larger(argument) for name, argument in arguments.items()})
    except (RuntimeError, ValueError, IndexError, TypeError):
        return None


def _has_tensors(argument: Any) -> bool:
    return isinstance(argument, Ref) or (isinstance(argument, tuple) and any(map(_has_tensors, argument)))


def _candidates(found: Schema, shapes: Sequence[Shape], given: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Arguments by name, tensors as their shapes. One shape for all tensors is tried first."""
    tensors = [each for each in found.arguments if "Tensor" in each.kind and each.name not in given]
    asked = [each for each in found.arguments if each.needed and "Tensor" not in each.kind and each.name not in given]
    choices = [_LITERALS.get(_plain(each.kind), (None,)) for each in asked]
    for chosen in product(*choices):
        named = {**given, **{each.name: value for each, value in zip(asked, chosen, strict=True)}}
        for placed in [_placed(tensors, shapes)] if shapes else _tensors([each for each in tensors if each.needed]):
            yield {**placed, **named}


def _tensors(needed: Sequence[Argument]) -> Iterator[dict[str, Any]]:
    counts = [2 if each.kind.startswith("List") else 1 for each in needed]
    slots = sum(counts)
    ways: list[tuple[tuple[int, ...], ...]] = [(shape,) * slots for shape in _SHAPES[:1]] if slots else [()]
    ways += [*product(_SHAPES, repeat=slots)] if 0 < slots <= 4 else [(shape,) * slots for shape in _SHAPES]
    for way in dict.fromkeys(ways):
        left, placed = [*way], dict[str, Any]()
        for each, count in zip(needed, counts, strict=True):
            taken = [(left.pop(0), _dtype(each.name)) for _ in range(count)]
            placed[each.name] = taken if each.kind.startswith("List") else taken[0]
        yield placed


def _placed(tensors: Sequence[Argument], shapes: Sequence[Shape]) -> dict[str, Any]:
    """Assigns given shapes to the arguments in order: required ones first; a list takes the rest."""
    needed = [each for each in tensors if each.needed]
    chosen = [each for each in tensors if each in needed or len(needed) < len(shapes)][: max(len(needed), len(shapes))]
    left, placed = [*shapes], dict[str, Any]()
    for k, each in enumerate(chosen):
        behind = len(chosen) - k - 1
        if each.kind.startswith("List"):
            count = len(left) - behind
            placed[each.name] = [_typed(each.name, left.pop(0)) for _ in range(max(count, 0))]
        elif left:
            placed[each.name] = _typed(each.name, left.pop(0))
    if left:
        raise ScrimpError(f"{len(shapes)} shapes for {len(tensors)} tensors: {', '.join(each.name for each in tensors)}")
    return placed


def _typed(name: str, shape: Shape) -> Shape:
    return shape if shape[1] else (shape[0], _dtype(name))


def _dtype(name: str) -> str:
    return _INT if name in _INDICES else _BOOL if name in _MASKS else _FLOAT


def _plain(kind: str) -> str:
    return kind.removeprefix("Optional[").removesuffix("]") if kind.startswith("Optional[") else kind


def _made(target: str, found: Schema, arguments: Mapping[str, Any]) -> Example | None:
    """The captured form of a call, with the output shapes that torch computes; None if the outputs are no tensors."""
    values: dict[str, Value] = {}

    def tensor(argument: Any) -> Any:
        if _is_shape(argument):
            return torch.zeros(argument[0], dtype=getattr(torch, argument[1]))
        return [tensor(each) for each in argument] if isinstance(argument, (list, tuple)) else argument

    def captured(argument: Any) -> Any:
        if _is_shape(argument):
            name = f"in{len(values)}"
            values[name] = Value(name=name, shape=argument[0], dtype=argument[1], storage=name, kind=BORDER)
            return Ref(name=name)
        return tuple(map(captured, argument)) if isinstance(argument, (list, tuple)) else argument

    first = next((k for k, each in enumerate(found.arguments) if each.keyword), len(found.arguments))
    positional = [arguments.get(each.name, each.default) for each in found.arguments[:first]]
    named = {each.name: arguments[each.name] for each in found.arguments[first:] if each.name in arguments}
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = found.function(*map(tensor, positional), **{name: tensor(each) for name, each in named.items()})
    outputs = made if isinstance(made, (tuple, list)) else (made,)
    if not outputs or not all(isinstance(each, torch.Tensor) for each in outputs):
        return None
    args, kwargs = tuple(map(captured, positional)), tuple((name, captured(each)) for name, each in named.items())
    names = []
    for k, output in enumerate(outputs):
        names.append(f"out{k}")
        dtype = str(output.dtype).removeprefix("torch.")
        values[names[-1]] = Value(name=names[-1], shape=tuple(output.shape), dtype=dtype, storage=names[-1], kind=MADE)
    op = Op(
        name="out0", target=target, args=args, kwargs=kwargs, outputs=tuple(names), backward=False, cell=0, flops=0, where="",
    )  # fmt: skip
    return op, values


def _is_shape(argument: Any) -> bool:
    return isinstance(argument, tuple) and len(argument) == 2 and isinstance(argument[0], tuple) and isinstance(argument[1], str)
