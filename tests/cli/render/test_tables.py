"""Tables at 80 columns and less: every name and every figure is there whole; a plan's layers that chose alike are one entry."""

from __future__ import annotations

import inspect
import re
from io import StringIO

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from scrimp.cli import _clusters, _doctor
from scrimp.cli._app import app
from scrimp.cli.demo import closing_table
from scrimp.cli.demo.train import Figures, Plain
from scrimp.cli.render.choices import Run, choice_lines, runs_of
from scrimp.cli.render.table import print_words, table_lines, wrapped
from scrimp.cluster import Cluster
from scrimp.cluster._presets import KINDS
from scrimp.layout import Mesh
from scrimp.planner.answers.plan import Plan, PlannedLayers, PlannedMemory, PlannedOp, PlannedWeight
from tests.cli.test_cli import _plain_wide_output, scrimp

__all__ = ["_plain_wide_output"]  # a fixture, for every test here

WORD = st.text("abcdefghij.", min_size=1, max_size=50)


def narrow() -> tuple[Console, StringIO]:
    out = StringIO()
    return Console(file=out, width=80, markup=False, highlight=False), out


def widest(text: str) -> int:
    return max(map(len, text.splitlines()))


@given(st.lists(st.tuples(WORD, WORD, WORD, WORD), min_size=1, max_size=5), st.integers(20, 120))
def test_no_cell_is_cut_and_rows_fit_if_their_cells_do(rows: list[tuple[str, ...]], width: int) -> None:
    headers = ("name", "one", "two", "three")
    lines = table_lines(headers, rows, width, right=("two",))
    text = "\n".join(lines)
    for row in rows:
        for cell in row:
            assert re.search(rf"(?:^|\s){re.escape(cell)}(?:$|\s)", text, re.MULTILINE)
    longest = max(len(cell) for row in (*rows, headers) for cell in row)
    assert widest(text) <= max(width, longest + len("    three "))


@given(st.lists(st.tuples(WORD, WORD), min_size=1, max_size=5), st.integers(40, 100))
def test_words_of_the_last_column_go_on_below(rows: list[tuple[str, str]], width: int) -> None:
    told = [(name, " ".join([words[:20]] * 9)) for name, words in rows]
    lines = table_lines(("", ""), told, width, pieces="")
    assert max(map(len, lines)) <= max(width, max(len(name) for name, _ in rows))
    assert "".join("".join(line.split()) for line in lines) == "".join(name + words.replace(" ", "") for name, words in told)


def test_a_figure_keeps_its_unit() -> None:
    assert wrapped("there are 13.5 GiB free of 20 GiB", 17) == ["there are", "13.5 GiB free of", "20 GiB"]
    assert wrapped("all_gather x; slice y", 14, ";") == ["all_gather x;", "slice y"]
    assert wrapped("a\nb", 80) == ["a", "b"]


def test_lines_of_a_terminal_are_broken_between_words() -> None:
    line = "peak      664.8 KiB a device, at the model, aten.nll_loss_backward.default; 398.0 KiB if every byte were there once"
    out = StringIO()
    print_words(Console(file=out, width=80, markup=False, highlight=False, force_terminal=True, no_color=True), line)
    first, second = out.getvalue().splitlines()
    assert first.startswith("peak      664.8 KiB a device")
    assert second.startswith("          ")
    assert f"{first} {second.strip()}" == line
    assert widest(out.getvalue()) <= 80
    out = StringIO()
    print_words(Console(file=out, width=80, markup=False, highlight=False), line)
    assert out.getvalue() == f"{line}\n"


# What commands print.


def test_kinds_of_devices() -> None:
    text = scrimp("clusters").output
    assert widest(text) <= 80
    for kind in KINDS:
        assert re.search(rf"^{re.escape(kind)} +[\d.]+ GiB( +[\d.]+){{5}}$", text, re.MULTILINE)


@pytest.mark.parametrize("name", ["16xH100", "99992xH100"])
def test_a_cluster(name: str) -> None:
    text = scrimp("clusters", name).output
    assert widest(text) <= 80
    assert all(re.search(rf"^{re.escape(row)} ", text, re.MULTILINE) for row in ("device memory", "between nodes"))


def test_what_the_doctor_finds() -> None:
    console, out = narrow()
    rows = [
        _doctor.Row(name="exchange kernel", text="a word " * 30 + "and 1234.5 GiB free of 9999.9 GiB", data={}),
        _doctor.Row(name="gpu", text="0: one\n1: two", data={}),
    ]
    _doctor.show(console, rows)
    assert widest(out.getvalue()) <= 80
    assert "1234.5 GiB" in out.getvalue()
    assert "9999.9 GiB" in out.getvalue()
    assert re.search(r"^gpu +0: one\n +1: two$", out.getvalue(), re.MULTILINE)


def test_a_move_of_many_steps() -> None:
    words = ["--mesh", "x=7,y=11,z=13", "--shape", "100100100,70070", "[x*y*z,-]", "[-,z*y]", "--no-peers"]
    text = scrimp("move", *words).output
    table = text.partition("\nsource")[0]
    assert widest(table) <= 80
    assert "…" not in text
    assert re.search(r"^received +[\d.]+ \S+ +[\d,]+ B +by the busiest", table, re.MULTILINE)


def test_the_closing_table_of_the_demo() -> None:
    big = 123_456_789_012
    figures, plain = (
        kind(**{name: 1234.567 if "seconds" in name else big for name in kind.__dataclass_fields__})  # type: ignore[arg-type]
        for kind in (Figures, Plain)
    )
    console, out = narrow()
    console.print(closing_table.table(plain, figures, figures))
    assert widest(out.getvalue()) <= 80
    assert "…" not in out.getvalue()
    assert out.getvalue().count(f"{big:,}") >= 18


# The layers of a plan.


def layers(path: str, first: int, count: int = 1, *, last: str = "", axes: str = "x", saved: str = "keep") -> PlannedLayers:
    weight = PlannedWeight(
        name=f"{path}.mlp.up.weight" if path else "head.weight", layout=f"[{axes},-]", weight_axes=(), gradient_axes=(),
        state_axes=(axes,),
    )  # fmt: skip
    op = PlannedOp(name="mm", target="aten.mm.default", saved=saved, inputs=("[-,-]",), outputs=("[-,-]",))
    return PlannedLayers(path=path, first=first, count=count, last=last or path, ops=(op,), weights=(weight,))


def plan_of(*every: PlannedLayers) -> Plan:
    memory = PlannedMemory(peak_nbytes=1, kinds=(), where="here")
    return Plan(
        mesh=Mesh.parse("x=2,y=2"), cluster=Cluster().to_json(), precision="bf16", optimizer="adamw", objective="memory",
        memory=memory, seconds=1.0, gap=0.0, seconds_gap=0.0, layers=every,
    )  # fmt: skip


def test_layers_that_chose_alike_are_one_entry() -> None:
    plan = plan_of(
        layers("", 0),
        layers("layers.0", 1),
        layers("layers.1", 2, 29, last="layers.29"),
        layers("layers.30", 31),
        layers("layers.31", 32, axes="y"),
        layers("layers.32", 33, saved="recompute"),
        layers("layers.33", 34, saved="recompute"),
        layers("", 35),
    )
    assert [run.title for run in runs_of(plan)] == [
        "the model",
        "layers.0 - layers.30 (31 layers)",
        "layers.31",
        "layers.32 - layers.33 (2 layers, 1 operators recompute)",
        "the model",
    ]
    lines = choice_lines(runs_of(plan), 80)
    assert lines[0].split() == ["weight", "in", "use", "weight", "over", "states", "over"]
    at = lines.index("layers.0 - layers.30 (31 layers)")
    assert lines[at + 1].split() == ["mlp.up.weight", "[x,-]", "x"]
    assert Plan.from_json(plan.to_json()).layers == plan.layers


def test_long_names_of_weights_stay_whole() -> None:
    name = "a_very_long_module_name_of_a_model." * 3 + "weight"
    runs = [Run(first="layers.0", last="layers.0", count=1, rows=((name, "[x*y,-]", "z", "z"), ("b", "[-]", "", "")), saved=())]
    lines = choice_lines(runs, 80)
    assert f"  {name}" in lines
    assert lines[lines.index(f"  {name}") + 1].split() == ["[x*y,-]", "z", "z"]
    assert all(len(line) <= 80 for line in lines if name not in line)


# Help.


def commands() -> list[tuple[str, ...]]:
    own = [(each.name or each.callback.__name__,) for each in app.registered_commands if each.callback]
    return [(), *own, ("rules",), ("rules", "list"), ("rules", "check"), ("rules", "discover")]


@pytest.mark.parametrize("words", commands(), ids=lambda words: " ".join(words) or "scrimp")
def test_help_has_an_example_and_its_lines_are_not_folded(words: tuple[str, ...]) -> None:
    from scrimp.cli import _app
    from scrimp.cli.rules import app

    found = {"": _app.root, "rules": app.rules, "list": app.list_, "check": app.check,
             "discover": app.discover}  # fmt: skip
    last = words[-1] if words else ""
    doc = inspect.getdoc(found.get(last) or getattr(_app, last))
    assert doc is not None
    text = scrimp(*words, "--help").output
    assert re.search(rf"^ +{' '.join(('scrimp', *words))}", text.partition("Examples")[2], re.MULTILINE)
    for line in doc.replace("\\[", "[").splitlines():
        assert re.search(rf"^ *{re.escape(line.strip())} *$", text, re.MULTILINE), line


def test_clusters_have_a_function_for_the_command_line() -> None:
    assert _clusters.cluster_of("8xH100").hardware is not None
