"""The command line: what it prints, what it refuses, and that it starts without torch."""

import json
import os
import re
import subprocess
import sys
from io import StringIO
from math import prod
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from scrimp.cli import _doctor
from scrimp.cli._app import app
from scrimp.cli._move import parse_shape
from scrimp.cli.demo import moves
from scrimp.cli.render.picture import borders, cells, frames, nbytes_text, picture, ranks_text
from scrimp.cluster import Cluster
from scrimp.layout import Mesh
from scrimp.move import Program, synthesize
from tests.support.probes import hurry_operators

MOVE = ("move", "--mesh", "x=2,y=4", "--shape", "8192,8192")


@pytest.fixture(autouse=True)
def _plain_wide_output(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("COLUMNS", "FORCE_COLOR", "GITHUB_ACTIONS", "PY_COLORS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_COLOR", "1")


def scrimp(*args: str, code: int = 0):
    result = CliRunner().invoke(app, args)
    assert result.exit_code == code, result.output
    return result


def program(shape: tuple[int, ...], mesh: str, src: str, dst: str, **options: bool) -> Program:
    return synthesize(shape, Mesh.parse(mesh), src, dst, **options)


# Help.


def test_help_names_the_commands_and_loads_no_torch() -> None:
    code = (
        "import sys, scrimp.cli\n"
        "assert 'typer' not in sys.modules\n"
        "sys.argv = ['scrimp', *sys.argv[1:]]\n"
        "try:\n    scrimp.cli.main()\n"
        "except SystemExit as end:\n    assert not end.code\n"
        "print('loaded', [name for name in ('torch', 'numpy', 'jax') if name in sys.modules])\n"
    )
    ran = subprocess.run([sys.executable, "-c", code, "--help"], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    assert all(command in ran.stdout for command in ("move", "doctor", "probe", "clusters", "demo"))
    assert "loaded []" in ran.stdout


def test_examples_of_the_help_work() -> None:
    text = scrimp("move", "--help").output
    examples = re.findall(r"^ +scrimp move (--mesh .*?) *$", text, re.MULTILINE)
    assert len(examples) == 4
    for example in examples:
        words = [word.strip('"') for word in example.split()]
        scrimp("move", *words, *([] if "--no-peers" in words else ["--no-peers"]))


def test_version() -> None:
    assert re.fullmatch(r"scrimp \d+\.\d+\S*\n", scrimp("--version").output)


# Move.


def test_move_shows_steps_bytes_peak_peers_and_picture() -> None:
    text = scrimp(*MOVE, "--collectives-only", "[x,y]", "[y,x]").output
    assert max(map(len, text.splitlines())) <= 80
    for pattern in (
        r"^\[x,y\] -> \[y,x\]  float32\[8192,8192\] on x=2,y=4 \(8 devices\): 2 steps$",
        r"source +\[x,y\] +4096 x 2048",
        r"1 +all_to_all y\.1, dim 1 -> 0 +\[x\*y\.1,y\.0\] +2048 x 4096 +16 MiB +681\.1",
        r"2 +permute +\[y,x\] +2048 x 4096 +32 MiB",
        r"received +48 MiB +50,331,648 B",
        r"lower bound +32 MiB +33,554,432 B",
        r"peak +32 MiB +33,554,432 B +the largest local array at any step:\n +1\.00x the cap",
        r"cap +32 MiB",
        r"time +[\d,.]+ us +0\.002033 s",
        r"scrimp, collectives only +48 MiB +1\.00x +1\.00x +all_to_all y\.1; permute",
        r"scrimp, direct exchange +32 MiB +0\.67x +1\.00x +direct",
        r"DTensor default +160 MiB +3\.33x +4\.00x +all_gather y;\n +all_to_all x; slice y",
        r"DTensor min-cost +80 MiB +1\.67x +2\.00x +all_gather x;\n +all_to_all y; slice x",
        r"naive gather and slice +224 MiB +4\.67x +8\.00x +all_gather x;",
        r"^source +after step 1 +after step 2$",
        r"^│ 4 │ 5 │ 6 │ 7 │",
    ):
        assert re.search(pattern, text, re.MULTILINE), f"{pattern} is not in\n{text}"


def test_move_without_peers_and_with_partial_sums() -> None:
    text = scrimp(*MOVE, "--no-peers", "--dtype", "bfloat16", "[-,-]+x", "[y,x]").output
    assert "DTensor" not in text
    assert "lower bound" not in text
    assert re.search(r"received +16 MiB", text)
    assert "0+4 1+5 2+6 3+7" in text


def test_a_peer_that_refuses_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    text = scrimp("move", "--mesh", "x=2,y=4", "--shape", "100", "[y.0]", "[y.1*x]").output
    assert re.search(r"DTensor default +- +- +- +no plan: layout \[y\.0\]:\n +DTensor splits", text)
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr("scrimp.ext.dtensor_plans._private", sys.modules["scrimp.ext.dtensor_plans"]._private.__wrapped__)
    text = scrimp(*MOVE, "[x,-]", "[-,x]").output
    assert re.search(r"DTensor min-cost +- +- +- +no plan: DTensor's plans", text)
    assert re.search(r"naive gather and slice .* +all_gather x; slice x", text)


def test_move_json_round_trips() -> None:
    text = scrimp(*MOVE, "--json", "[x,y]", "[y,x]").output
    assert Program.from_json(text) == program((8192, 8192), "x=2,y=4", "[x,y]", "[y,x]")
    slow = scrimp(*MOVE, "--json", "--collectives-only", "--gb-per-s", "1", "--latency-us", "5", "[x,y]", "[y,x]").output
    assert Program.from_json(slow).steps[-1].seconds == pytest.approx(5e-6 + 2**25 / 1e9)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("[w,-]", "[x,-]"), "source layout [w,-]: axis 'w' is not in the mesh, which has x=2, y=4"),
        (("[x,-]", "[x,x]"), "layout [x,x]: axis 'x' is used twice"),
        (("[x]", "[x,-]"), "source layout [x] has 1 dims, but the shape (8192, 8192) has 2"),
        (("[x,-]", "x,-"), "layout 'x,-': expected one entry per dim in brackets"),
        (("[x,-]", "[-,-]+x"), "target [-,-]+x is a partial sum over ['x'], source [x,-] is not"),
        (("--dtype", "float7", "[x,-]", "[-,x]"), "dtype 'float7' is unknown"),
        (("--shape", "8192x", "[x]", "[y]"), "shape '8192x': '8192x' is not a whole number of 0 or more, up to 19 digits; give"),
        (("--shape", "8,,8", "[x,-]", "[-,x]"), "shape '8,,8': '' is not a whole number"),
        (("--mesh", "x2", "[x,-]", "[-,x]"), "mesh 'x2': 'x2' is not of the form name=size"),
        (("--gb-per-s", "0", "[x,-]", "[-,x]"), "bandwidth more than 0"),
        (("--latency-us", "nan", "[x,-]", "[-,x]"), "both must be finite numbers"),
    ],
)
def test_wrong_input_is_one_line(args: tuple[str, ...], message: str) -> None:
    result = scrimp(*MOVE, "--no-peers", *args, code=2)
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_wrong_input_has_no_traceback_in_a_process() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", "import scrimp.cli; scrimp.cli.main()", *MOVE, "[x,-]", "[-,q]"],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )
    assert ran.returncode == 2
    assert ran.stdout == ""
    assert ran.stderr == "error: target layout [-,q]: axis 'q' is not in the mesh, which has x=2, y=4\n"


def test_shapes() -> None:
    assert parse_shape("8192, 4") == (8192, 4)
    assert parse_shape(" ") == ()


# The picture.


def test_picture() -> None:
    drawn = picture(program((8, 8), "x=2,y=4", "[x,y]", "[y,x]", direct=False))
    assert (
        drawn
        == """\
source              after step 1        after step 2
[x,y]               [x*y.1,y.0]         [y,x]
┌───┬───┬───┬───┐   ┌───────┬───────┐   ┌───────┬───────┐
│   │   │   │   │   │   0   │   2   │   │   0   │   4   │
│ 0 │ 1 │ 2 │ 3 │   ├───────┼───────┤   ├───────┼───────┤
│   │   │   │   │   │   1   │   3   │   │   1   │   5   │
├───┼───┼───┼───┤   ├───────┼───────┤   ├───────┼───────┤
│   │   │   │   │   │   4   │   6   │   │   2   │   6   │
│ 4 │ 5 │ 6 │ 7 │   ├───────┼───────┤   ├───────┼───────┤
│   │   │   │   │   │   5   │   7   │   │   3   │   7   │
└───┴───┴───┴───┘   └───────┴───────┘   └───────┴───────┘

a cell names the ranks that hold it; dim 0 runs down, dim 1 to the right"""
    )


@pytest.mark.parametrize(
    ("shape", "mesh", "layout", "labels"),
    [
        ((8,), "x=2,y=4", "[x]", [["0-3", "4-7"]]),
        ((8,), "x=2,y=4", "[y]", [["0 4", "1 5", "2 6", "3 7"]]),
        ((), "x=2,y=4", "[]", [["0-7"]]),
        ((), "x=2,y=4", "[]+x+y", [["0+..+7"]]),
        ((4, 4), "x=2,y=2", "[-,x]+y", [["0+1", "2+3"]]),
        ((4, 4), "x=2,y=2", "[-,-]+x", [["0+2 1+3"]]),
        ((4, 4, 4), "x=2,y=2,z=2", "[x,y,z]", [["0|1", "2|3"], ["4|5", "6|7"]]),
        ((4, 4, 4), "x=2,y=2,z=2", "[x,-,z]", [["0 2|1 3"], ["4 6|5 7"]]),
        ((3, 2), "x=4", "[x,-]", [["0"], ["1"], ["2"]]),
        ((0, 2), "x=4", "[x,-]", [["empty"]]),
    ],
)
def test_cells_name_their_holders(shape: tuple[int, ...], mesh: str, layout: str, labels: list[list[str]]) -> None:
    still = program(shape, mesh, layout, layout)
    assert [list(row) for row in cells(frames(still)[0], still.mesh).labels] == labels


def test_uneven_tiles_stand_in_proportion() -> None:
    drawn = picture(program((5, 3), "x=2,y=4", "[x*y,-]", "[-,y]"))
    assert "nothing on 5-7" in drawn
    assert "nothing on 3 7" in drawn
    assert borders([(0, 4), (4, 5)], 10, 2) == [0, 8, 10]
    assert borders([(0, 99), (99, 100)], 10, 2) == [0, 5, 10]


def test_large_meshes_and_many_dims_are_listed() -> None:
    drawn = picture(program((4096, 4096), "x=8,y=8", "[x,y]", "[y,x]"))
    assert "7: 0:512 3584:4096" in drawn
    assert "and 56 more" in drawn
    assert "┌" not in drawn
    assert "1: 1:2 0:4 0:4 0:4   1: 0:4 1:2 0:4 0:4" in picture(program((4,) * 4, "x=4", "[x,-,-,-]", "[-,x,-,-]"))


def test_pictures_fit() -> None:
    assert max(map(len, picture(program((64, 64), "x=4,y=4", "[x*y,-]", "[-,y*x]")).splitlines())) <= 100
    narrow = picture(program((64, 64), "x=2,y=4", "[x,y]", "[y,x]", direct=False), 40).splitlines()
    assert narrow[0] == "source              after step 1"
    assert "after step 2" in narrow
    assert max(map(len, narrow[:-1])) <= 40  # the legend is a sentence


def test_small_texts() -> None:
    assert ranks_text([6, 0, 1, 2, 3, 8, 9]) == "0-3 6 8 9"
    sizes = (0, 1023, 1024, 1536, 1020 * 1024, 3 << 30, 5 << 50)
    assert [nbytes_text(n) for n in sizes] == ["0 B", "1023 B", "1 KiB", "1.5 KiB", "1020 KiB", "3 GiB", "5120 TiB"]


# Clusters.


def test_clusters(tmp_path: Path) -> None:
    text = scrimp("clusters").output
    assert re.search(r"^A100-80 +80\.0 GiB +312 +2039 +32 +300 +25$", text, re.MULTILINE)
    file, own = tmp_path / "cluster.json", tmp_path / "own.toml"
    text = scrimp("clusters", "16xH100", "--json", str(file)).output
    assert re.search(r"^devices +16 H100: 2 x 8", text, re.MULTILINE)
    assert re.search(r"^mesh x=4,y=4 +x between nodes \(33% of its peers inside\), y inside nodes", text, re.MULTILINE)
    assert Cluster.from_json(file.read_text()) == Cluster.preset("16xH100")
    own.write_text('nodes = 1\ndevices_per_node = 3\nkind = "24GiB"')
    assert "3 24GiB: 1 x 3" in scrimp("clusters", str(own)).output
    assert "kinds are A100-40" in scrimp("clusters", "8xTPU", code=2).stderr
    assert "name it" in scrimp("clusters", "--json", str(file), code=2).stderr
    assert "there is no folder" in scrimp("clusters", "8xH100", "--json", str(tmp_path / "no" / "file"), code=2).stderr


# The probe.


def test_probe(tmp_path: Path) -> None:
    file = tmp_path / "machine.json"
    text = scrimp("probe", "--device", "cpu", "--disk", str(tmp_path), "--json", str(file)).output
    for name in ("device", "compute, bf16", "copies up", "copies down", "host update", "disk"):
        assert re.search(rf"^{name}.* \S", text, re.MULTILINE), text
    assert "beside a plan: not measured, because this device is a CPU" in text
    machine = Cluster.from_json(file.read_text()).machine
    assert machine is not None
    assert all(figure in text for _, figure in machine.rows())
    wrong = scrimp("probe", "--device", "cpu", "--json", str(tmp_path / "no" / "where.json"), code=2)
    assert "there is no folder" in wrong.stderr
    assert "neither 'cuda' nor 'cpu'" in scrimp("probe", "--device", "meta", code=2).stderr
    assert "give both" in scrimp("probe", "--cluster", "8xH100", code=2).stderr


def test_probe_of_operators(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hurry_operators(monkeypatch)
    file = tmp_path / "measured.json"
    text = scrimp("probe", "--device", "cpu", "--operators", "--cluster", "8xA100-80", "--json", str(file)).output
    assert re.search(r"^causal attention, backward +bfloat16 .* TFLOP/s .* %$", text, re.MULTILINE), text
    cluster = Cluster.load(file)
    assert cluster.operators is not None
    assert cluster.hardware == Cluster.preset("8xA100-80").hardware
    assert "peak" in scrimp("plan", "gpt-tiny", "--cluster", str(file), "--mesh", "x=8", "--time-limit", "2").output


# The doctor.


def test_doctor() -> None:
    text = scrimp("doctor").output
    for name in (
        "python",
        "memory",
        "disk",
        "torch",
        "native kernel",
        "exchange kernel",
        "device kernel",
        "gpu",
        "distributed",
        "packages",
    ):
        assert re.search(rf"^{name} +\S", text, re.MULTILINE), text
    assert "failed" not in text


def test_doctor_survives_its_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> _doctor.Finding:
        raise OSError("no such\nmeter")

    def warns() -> _doctor.Finding:
        import warnings

        warnings.warn("old driver", stacklevel=1)
        return "fine", {}

    def leaves() -> _doctor.Finding:
        sys.exit(3)

    for name, probe in (("memory", broken), ("torch", warns), ("gpu", leaves)):
        monkeypatch.setitem(_doctor.PROBES, name, probe)
    text = scrimp("doctor").output
    assert re.search(r"^memory +failed: OSError: no such meter", text, re.MULTILINE)
    assert re.search(r"^torch +fine; warned: old driver", text, re.MULTILINE)
    assert re.search(r"^gpu +failed: SystemExit: 3", text, re.MULTILINE)
    data = json.loads(scrimp("doctor", "--json").output)
    assert data["probes"]["memory"] == {"failed": "OSError: no such meter"}
    assert data["probes"]["python"]["version"]


def test_cgroup_limits(tmp_path) -> None:
    membership = tmp_path / "cgroup"
    membership.write_text("0::/a/b\n")
    inner = tmp_path / "root" / "a" / "b"
    inner.mkdir(parents=True)
    assert _doctor.cgroup_limit_nbytes(tmp_path / "root", membership) is None
    (inner / "memory.max").write_text("max\n")
    (inner.parent / "memory.max").write_text("4096\n")
    (tmp_path / "root" / "memory.max").write_text("8192\n")
    assert _doctor.cgroup_limit_nbytes(tmp_path / "root", membership) == 4096
    membership.write_text("7:cpu:/\n4:hugetlb,memory:/a\n")
    (tmp_path / "root" / "memory" / "a").mkdir(parents=True)
    (tmp_path / "root" / "memory" / "a" / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert _doctor.cgroup_limit_nbytes(tmp_path / "root", membership) is None


def test_doctor_deep() -> None:
    assert scrimp("doctor", "--deep", "--json").output.count('"gloo": {"works": true}') == 1


# The demo, on two ranks.


def test_demo_of_moves() -> None:
    mesh, out = Mesh({"x": 2}), StringIO()
    problems = [
        moves.MoveProblem("T1", mesh, (64, 64), "[x,-]", "[-,x]"),
        moves.MoveProblem("T2", mesh, (64, 64), "[-,x]", "[-,-]"),
    ]
    moves.moves(Console(file=out, width=100, markup=False), problems)
    text = out.getvalue()
    assert re.search(r"T1 +\[x,-\] -> \[-,x\] +0\.00 +0\.01 +2\.0x +1\.0 +2\.0 +[\d.]+ +[\d.]+ +[\d.]+x +✓", text)
    assert re.search(r"T2 +\[-,x\] -> \[-,-\] .* 1\.0x +1\.0 +1\.0 .*✓", text)
    assert "Geometric means: scrimp receives 1.4x less than torch" in text
    assert "meshes  T is x=2\n" in text
    assert "0 of scrimp's and 1 of torch's hold more" in text
    assert "Wrong" not in text
    assert "make bench-move" in text


def test_demo_of_moves_owns_up_to_wrong_values() -> None:
    fine = moves.Side(received_nbytes=1 << 20, peak_over_cap=1.0, seconds=0.05, right=True)
    wrong = moves.Side(received_nbytes=2 << 20, peak_over_cap=2.0, seconds=1.0, right=False)
    results = [(problem, fine, wrong) for problem in moves.PROBLEMS]
    assert "Wrong values: A1 of torch, A3 of torch" in moves.closing(results, [])
    out = StringIO()
    Console(file=out, width=80, markup=False).print(moves.results_table(results, 80))
    assert out.getvalue().count("✗") == len(results)
    assert "…" not in out.getvalue()


def test_problems_of_the_demo_are_small_and_for_eight_ranks() -> None:
    assert {problem.mesh.size for problem in moves.PROBLEMS} == {8}
    for problem in moves.PROBLEMS:
        made = program(problem.shape, str(problem.mesh), problem.src, problem.dst)
        assert made.peak_numel == made.cap_numel
        assert prod(problem.shape) * made.itemsize == 16 << 20
