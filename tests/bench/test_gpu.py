"""The GPU benchmark as far as it goes without a GPU: real processes on a tiny model, and its rules about rows."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

from bench.gpu import command as gpu
from bench.gpu import page as gpu_page
from bench.gpu.contenders import COMPUTE, FSDP2, PLAIN, SCRIMP, WEIGHT_DECAY, _Master
from bench.gpu.results import TOLERANCE, Row, key_of, parity, spared, tables, usable
from bench.gpu.sections import SECTIONS, TINY, Point
from bench.gpu.watch import SPARE_NBYTES, Outcome, watched
from bench.svg import Series, plot, ticks

CASE = replace(TINY, device="cpu")
MACHINE = {"gpu": "a", "cpu": "b", "cores": "1", "torch": "2"}


def row(contender: str, **more: object) -> Row:
    modes = {"unclipped": {"median_s": 1.0, "least_s": 0.9, "most_s": 1.1, "window_s": 5.0}}
    found = {"contender": contender, "case": asdict(CASE), "commit": "c", "machine": MACHINE, "when": "2026", "modes": modes}
    sizes = {"built_s": 1.0, "reserved_nbytes": 1 << 20, "host_nbytes": 1 << 20, "losses": [2.0, 1.5]}
    return {**found, **sizes, **more}


def test_tiny_is_run_resumed_and_written_up(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ["--section", "tiny", "--device", "cpu", "--results", str(tmp_path), "--commit", "now"]
    arguments += ["--contender", SCRIMP, "--contender", PLAIN]
    gpu.main(arguments)
    path = tmp_path / "now.json"
    rows = {found["contender"]: found for found in json.loads(path.read_text())["rows"]}
    assert {*rows} == {SCRIMP, PLAIN}
    for found in rows.values():
        assert "failed" not in found
        assert {*found["modes"]} == {"unclipped", "clipped"}
        assert len(found["losses"]) == 15
        assert found["losses"][0] - found["losses"][-1] > 10 * TOLERANCE  # or equal curves would say little
        for mode in found["modes"].values():
            assert 0 < mode["least_s"] <= mode["median_s"] <= mode["most_s"]
            assert mode["window_s"] >= 5 * mode["least_s"]
    assert rows[SCRIMP]["modes"]["clipped"]["bound"]["text"]
    assert float(parity(rows[PLAIN], rows[SCRIMP])) <= TOLERANCE
    written = path.stat().st_mtime_ns
    gpu.main(arguments)
    assert path.stat().st_mtime_ns == written
    capfd.readouterr()
    gpu_page.main(["--results", str(tmp_path), "--docs", str(tmp_path), "--device", "cpu"])
    page = (tmp_path / "performance.md").read_text()
    assert f"{rows[SCRIMP]['modes']['clipped']['median_s']:.3f}" in page
    assert "## tiny-llama\n\nNot measured yet." in page
    assert ElementTree.parse(tmp_path / "step-time-by-size-clipped.svg").getroot().tag.endswith("svg")


def test_a_page_without_results_says_so(tmp_path: Path) -> None:
    gpu_page.main(["--results", str(tmp_path), "--docs", str(tmp_path)])
    page = (tmp_path / "performance.md").read_text()
    assert page.count("Not measured yet.") >= len(SECTIONS)
    assert not [*tmp_path.glob("*.svg")]


def test_what_takes_too_long_is_ended_with_its_children(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    command = ["sh", "-c", f"sleep 60 & echo $! > {pid}; echo said; wait"]
    outcome = watched(command, seconds=1)
    assert outcome.ended == "not done in 1 s"
    assert outcome.stdout == "said\n"
    _assert_gone(int(pid.read_text()))


def test_before_the_host_runs_out_a_process_is_ended() -> None:
    left = iter([10 * SPARE_NBYTES, 3 * SPARE_NBYTES, SPARE_NBYTES - 1])
    outcome = watched([sys.executable, "-c", "import time; time.sleep(60)"], seconds=30, available=lambda: next(left))
    assert outcome.ended == "host memory ran out"
    assert outcome.host_nbytes == 9 * SPARE_NBYTES + 1
    assert outcome.seconds < 20


def test_a_mode_that_was_done_survives_the_failure_of_the_next() -> None:
    said = {"stdout": 'log\n{"built_s": 1.5, "modes": {}}\nmore', "stderr": "torch.OutOfMemoryError: CUDA out of memory. Tried"}
    outcome = Outcome(**said, returncode=1, ended=None, seconds=2.0, host_nbytes=7)
    assert gpu.row_of(outcome)["failed"] == "out of GPU memory"
    assert gpu.row_of(outcome)["built_s"] == 1.5
    assert gpu.row_of(replace(outcome, ended="not done in 9 s"))["failed"] == "not done in 9 s"
    assert "failed" not in gpu.row_of(replace(outcome, returncode=0))


def test_only_other_contenders_are_kept_from_older_commits() -> None:
    rows = [row(SCRIMP), row(FSDP2), row(PLAIN, failed="not installed"), row(COMPUTE, machine={**MACHINE, "gpu": "other"})]

    def names(commit: str, *, keep: bool) -> set[str]:
        return {found["contender"] for found in usable(rows, commit, MACHINE, keep=keep).values()}

    assert names("c", keep=False) == {SCRIMP, FSDP2}
    assert names("d", keep=False) == set()
    assert names("d", keep=True) == {FSDP2}
    assert usable([row(SCRIMP, commit="unknown")], "unknown", MACHINE, keep=False) == {}


def test_a_cap_that_made_no_difference_is_not_measured_again() -> None:
    rows = {"": row(FSDP2)}
    larger, smaller = replace(CASE, cap="2GiB"), replace(CASE, cap="512MiB")
    found = spared(FSDP2, larger, rows)
    assert found is not None
    assert (found["seen_at"], found["case"]["cap"]) == ("1GiB", "2GiB")
    assert spared(FSDP2, smaller, rows) is None
    assert spared(FSDP2, replace(larger, batch=3), rows) is None
    assert spared(SCRIMP, larger, {"": row(SCRIMP)}) is None
    assert spared(FSDP2, smaller, {"": row(FSDP2, failed="host memory ran out")}) is not None
    assert spared(FSDP2, larger, {"": row(FSDP2, failed="out of GPU memory")}) is None


def test_plain_pytorch_is_not_built_where_its_weights_and_states_alone_do_not_fit() -> None:
    needed = 14 * CASE.parameters()
    assert spared(PLAIN, replace(CASE, cap=str(needed)), {}) is None
    assert "not run" in (spared(PLAIN, replace(CASE, cap=str(needed - 1)), {}) or {})["failed"]


def test_other_losses_are_called_so_in_the_table() -> None:
    ours, theirs = row(SCRIMP), row(PLAIN, losses=[2.0, 1.5 - 2 * TOLERANCE])
    assert parity(theirs, ours) == "0.1000: NOT THE SAME"
    assert parity(row(PLAIN, losses=[2.0]), ours) == "0.0000"  # as far as it came
    assert parity(row(COMPUTE, losses=[9.0]), ours) == ""  # it learns nothing
    rows = {key_of(found["contender"], CASE): found for found in (ours, theirs)}
    assert "NOT THE SAME" in tables([Point(case=CASE, contenders=[SCRIMP, PLAIN])], rows)


def test_masters_of_bf16_weights_train_as_adamw_does() -> None:
    """What torchao is given: it refuses machines without a GPU, so only this part of it can be tried here."""
    draw = torch.Generator().manual_seed(0)
    first = torch.randn(64, generator=draw)
    weight, master = nn.Parameter(first.to(torch.bfloat16)), first.clone()
    ours, theirs = _Master([weight], lr=1e-2), torch.optim.AdamW([master], lr=1e-2, weight_decay=WEIGHT_DECAY, fused=True)
    ours.begin([first])
    for _ in range(3):
        weight.grad = torch.randn(64, generator=draw).to(torch.bfloat16)
        master.grad = weight.grad.float()
        ours.step()
        theirs.step()
        assert torch.equal(weight, master.to(torch.bfloat16))


def test_sections_have_the_sizes_that_they_say() -> None:
    points = {name: make() for name, make in SECTIONS.items()}
    assert [round(point.case.parameters() / 1e9, 2) for point in points["24GiB"] + points["12GiB"]] == [6.86, 2.78]
    assert [round(point.case.parameters() / 1e9, 1) for point in points["largest"][:2]] == [18.1, 28.2]
    assert [round(point.case.parameters() / 1e9, 1) for point in points["llama"]] == [1.7, 1.7]
    assert [round(point.case.parameters() / 1e9, 1) for point in points["sizes"]] == [1.4, 2.8, 6.9, 13.1, 18.1]
    for name, make in SECTIONS.items():
        assert make.__doc__, name


def test_plots_begin_at_zero_and_hold_all_points() -> None:
    assert ticks(1.0) == [0.0, 0.2, 0.4, 0.6000000000000001, 0.8, 1.0]
    assert ticks(139) == [0, 20, 40, 60, 80, 100, 120, 140]
    drawn = ElementTree.fromstring(plot("a < b", "x", "y", [Series(name="s", points=[(1, 2), (3, 4)], colour=0)]))
    circles = drawn.findall("{http://www.w3.org/2000/svg}circle")
    assert len(circles) == 2
    assert float(circles[0].attrib["cx"]) < float(circles[1].attrib["cx"])
    assert float(circles[0].attrib["cy"]) > float(circles[1].attrib["cy"])


def _assert_gone(pid: int) -> None:
    for _ in range(100):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return
        if state == "Z":  # dead, if nobody has asked for it yet
            return
        time.sleep(0.05)
    raise AssertionError(f"process {pid} is still there")
