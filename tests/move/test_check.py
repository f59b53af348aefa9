"""The checker refuses what is wrong: every way to spoil a right program that we know of."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from scrimp.errors import MoveError
from scrimp.layout import Layout, Mesh
from scrimp.move import Program, Step, synthesize

MESH = Mesh({"x": 2, "y": 4})


def program(src: str = "[x,y]", dst: str = "[y,x]", shape: tuple[int, ...] = (64, 64)) -> Program:
    return synthesize(shape, MESH, src, dst, direct=False)


def spoil(whole: Program, index: int, **changes: Any) -> Program:
    steps = list(whole.steps)
    steps[index] = dataclasses.replace(steps[index], **changes)
    return dataclasses.replace(whole, steps=tuple(steps))


def hand_made(src: str, dst: str, *steps: tuple[str, str, dict[str, Any]]) -> Program:
    """Steps as (kind, layout after it, what else)."""
    made, here = [], Layout.parse(src).split(MESH)
    for kind, after, rest in steps:
        made.append(Step(kind=kind, before=here, after=Layout.parse(after).split(MESH), **rest))
        here = made[-1].after
    return Program(
        shape=(64, 64),
        padded=(64, 64),
        mesh=MESH,
        src=Layout.parse(src),
        dst=Layout.parse(dst),
        dtype="float32",
        steps=tuple(made),
    )


SPOILED: dict[str, tuple[Callable[[], Program], str]] = {
    "a step left out": (lambda: dataclasses.replace(program(), steps=program().steps[1:]), "starts at"),
    "the last step left out": (lambda: dataclasses.replace(program(), steps=program().steps[:-1]), "not at its target"),
    "fewer bytes claimed": (lambda: spoil(program(), 0, received_numel=1), "1 elements received"),
    "an unknown kind": (lambda: spoil(program(), 0, kind="teleport"), "not a kind"),
    "a wrong dim": (lambda: spoil(program(), 0, dim=0, to_dim=1), "not on top of dim 0"),
    "a dim that is not there": (lambda: spoil(program(), 0, to_dim=7), "no dim 7"),
    "one dim twice": (lambda: spoil(program(), 0, to_dim=1), "same"),
    "no axes": (lambda: spoil(program(), 0, axes=()), "no axes"),
    "axes not on top": (
        lambda: hand_made("[x*y,-]", "[y,x]", ("all_to_all", "[y,x]", {"axes": ("x",), "dim": 0, "to_dim": 1})),
        "not on top",
    ),
    "slice of an axis in use": (
        lambda: hand_made("[x,-]", "[x,x.0]", ("slice", "[-,x]", {"axes": ("x",), "dim": 1})), "twice|in use|both use",
    ),
    "a permute that changes the tiles": (
        lambda: hand_made("[x,-]", "[y,-]", ("permute", "[y,-]", {"received_numel": 1024})), "tiles",
    ),
    "an exchange that changes the size": (
        lambda: hand_made("[x,-]", "[y,-]", ("exchange", "[y,-]", {"received_numel": 1024})), "tiles",
    ),
    "a gather before a slice": (
        lambda: hand_made(
            "[x,-]", "[-,y]",
            ("all_gather", "[-,-]", {"axes": ("x",), "dim": 0, "received_numel": 2048}),
            ("slice", "[-,y]", {"axes": ("y.0", "y.1"), "dim": 1}),
        ),
        "first fall|above the larger",
    ),
    "a peak above the cap": (
        lambda: hand_made(
            "[x,-]", "[-,x]",
            ("all_gather", "[-,-]", {"axes": ("x",), "dim": 0, "received_numel": 2048}),
        ),
        "above the larger",
    ),
    "a sum of what is no partial sum": (
        lambda: hand_made("[x,-]", "[x,-]", ("all_reduce", "[x,-]", {"axes": ("y.0",)})), "not all partial",
    ),
    "a scatter of what is no partial sum": (
        lambda: hand_made("[x,-]", "[x,y]", ("reduce_scatter", "[x,y]", {"axes": ("y.0", "y.1"), "dim": 1})), "not all partial",
    ),
    "a partial sum lost": (
        lambda: hand_made("[x,-]+y", "[-,x]", ("direct", "[-,x]", {"received_numel": 1024})), "partial axes change",
    ),
    "a direct exchange in the middle": (
        lambda: hand_made(
            "[x,-]", "[x,-]", ("direct", "[-,x]", {"received_numel": 1024, "messages": 1}),
            ("direct", "[x,-]", {"received_numel": 1024, "messages": 1}),
        ),
        "ends a program",
    ),
    "a padding that is no tiling": (
        lambda: dataclasses.replace(program("[x,-]", "[-,x]", (10, 6)), padded=(12, 6)), "10 to 12|received",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SPOILED)
def test_a_spoiled_program_is_refused(name: str) -> None:
    make, words = SPOILED[name]
    with pytest.raises(Exception, match=words) as caught:
        make().check()
    assert type(caught.value).__name__ in ("MoveError", "LayoutError")


def test_a_right_program_passes_and_returns_itself() -> None:
    whole = program()
    assert whole.check() is whole


def test_programs_of_other_versions_are_refused_by_name() -> None:
    text = program().to_json().replace('"version": 1', '"version": 99')
    with pytest.raises(MoveError, match=r"version 99.*version 1"):
        Program.from_json(text)
