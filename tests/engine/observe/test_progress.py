"""Seeing a run: what is shown where, and a metrics file that has every step once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

import scrimp
from scrimp.chunks.tables.optimizers import SGD, Rate
from scrimp.engine import Engine, Memory
from scrimp.engine.observe import progress as progress_module
from scrimp.engine.observe.progress import Progress
from scrimp.errors import RunError
from scrimp.report import MetricsFile, read_metrics

FIELDS = [
    "step", "loss", "seconds", "tokens_per_second", "device_peak_nbytes", "host_nbytes", "up_nbytes", "down_nbytes", "skipped",
]  # fmt: skip


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return (x * x).mean()


def engine_of(lr: Rate = 0.1) -> Engine:
    torch.manual_seed(0)
    engine = Engine(Tiny(), optimizer=SGD(lr=lr), memory=Memory(device="1MiB"), device="cpu", precision="fp32")
    engine._run.planning._on_device = frozenset()  # none on the device, so that there is traffic to see
    return engine


def train(engine: Engine, progress: Progress, steps: int, factor: float = 1.0) -> None:
    for _ in range(steps):
        progress.update(engine.step(torch.ones(3, 4) * factor), tokens=12)


def shown(console: Console) -> str:
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def plain() -> Console:
    return Console(file=StringIO(), force_terminal=False)


def terminal(width: int = 200) -> Console:
    return Console(file=StringIO(), force_terminal=True, width=width)


class Clock:
    """Each look takes so many seconds."""

    def __init__(self, seconds: float) -> None:
        self.now = 0.0
        self.seconds = seconds

    def __call__(self) -> float:
        self.now += self.seconds
        return self.now


def test_quiet_shows_nothing_but_writes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    engine, console = engine_of(), plain()
    with Progress(engine, quiet=True, metrics=tmp_path / "m.jsonl", console=console) as progress:
        train(engine, progress, 3)
    assert shown(console) == ""
    assert capfd.readouterr() == ("", "")
    assert len(read_metrics(tmp_path / "m.jsonl")) == 3


def test_by_default_it_goes_to_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    engine = engine_of()
    with scrimp.Progress(engine) as progress:
        train(engine, progress, 1)
    out, err = capfd.readouterr()
    assert out == ""
    assert "step 1" in err


def test_plain_lines_have_every_field() -> None:
    engine, console = engine_of(), plain()
    with Progress(engine, steps=40, console=console) as progress:
        train(engine, progress, 40)
    lines = shown(console).splitlines()
    assert [line.split()[1] for line in lines] == ["1/40", *(f"{k}/40" for k in range(4, 41, 4))]
    for words in ["loss 0.", " tokens/s", "eta 0:0", "device 0 B, peak ", " of 1.0 MiB", "host ", "up ", "down ", " a step"]:
        assert words in lines[1], lines[1]
    assert "skipped" not in lines[1]
    assert "\x1b" not in shown(console)


def test_plain_lines_come_at_least_every_ten_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_module, "perf_counter", Clock(1.5))
    engine, console = engine_of(), plain()
    with Progress(engine, console=console) as progress:
        train(engine, progress, 20)
    steps = [int(line.split()[1]) for line in shown(console).splitlines()]
    assert steps == [1, 8, 15, 20]  # the last in any case


def test_tokens_and_time_to_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_module, "perf_counter", Clock(0.5))
    engine, console = engine_of(), plain()
    with Progress(engine, steps=1000, console=console) as progress:
        train(engine, progress, 1)
    assert "24 tokens/s  eta 0:08:20" in shown(console)  # 12 tokens and half a second a step


def test_mfu_where_flops_and_rate_are_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(progress_module, "perf_counter", Clock(0.5))
    engine, console = engine_of(), plain()
    settings: dict[str, Any] = {"flops": 2e9, "flops_per_second": 1e10, "console": console, "metrics": tmp_path / "m.jsonl"}
    with Progress(engine, **settings) as progress:
        train(engine, progress, 1)
    assert "tokens/s  mfu 40.0%" in shown(console)  # 0.2 of 0.5 seconds
    assert scrimp.read_metrics(tmp_path / "m.jsonl")[0]["mfu"] == pytest.approx(0.4)
    with Progress(engine, flops=2e9, console=console, metrics=tmp_path / "n.jsonl") as progress:
        train(engine, progress, 1)
    assert "mfu" not in scrimp.read_metrics(tmp_path / "n.jsonl")[0]


def test_a_line_every_few_steps() -> None:
    engine, console = engine_of(), plain()
    with Progress(engine, steps=10, every=3, console=console) as progress:
        train(engine, progress, 10)
    assert [line.split()[1] for line in shown(console).splitlines()] == ["1/10", "3/10", "6/10", "9/10", "10/10"]


def test_figures_of_the_user_and_time_that_belongs_to_no_step(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    clock = Clock(0.5)
    monkeypatch.setattr(progress_module, "perf_counter", clock)
    engine, console = engine_of(), plain()
    with Progress(engine, console=console, metrics=tmp_path / "m.jsonl") as progress:
        with progress.paused():
            clock.now += 100
        engine.step(torch.ones(3, 4))
        progress.update(1.0, tokens=12, validation_loss=2.5)
        with pytest.raises(RunError, match=r"update\(lr=...\): the metrics have a figure of that name"):
            progress.update(1.0, lr=3.0)
    assert "loss 1.0000  validation loss 2.5000" in shown(console)
    (row,) = scrimp.read_metrics(tmp_path / "m.jsonl")
    assert row["validation_loss"] == 2.5
    assert row["seconds"] < 10


def test_the_slow_first_step_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(50.0)
    monkeypatch.setattr(progress_module, "perf_counter", clock)
    engine, console = engine_of(), plain()
    with Progress(engine, steps=10, console=console) as progress:
        train(engine, progress, 1)
        clock.seconds = 1.0
        train(engine, progress, 2)
    etas = [line.split("eta ")[1].split()[0] for line in shown(console).splitlines()]
    assert etas == ["0:07:30", "0:00:08", "0:00:07"]


def test_on_a_terminal_a_bar_follows() -> None:
    engine, console = engine_of(), terminal()
    with Progress(engine, steps=5, console=console) as progress:
        train(engine, progress, 5)
    text = shown(console)
    assert "\x1b[" in text
    for words in ["━━━", "step 1/5", "step 5/5", "loss 0.", "tokens/s", "of 1.0 MiB", "down"]:
        assert words in text, text
    narrow = terminal(width=60)
    with Progress(engine, console=narrow) as progress:
        train(engine, progress, 1)
    assert "step 6" in shown(narrow)
    assert "a step" in shown(narrow)  # the end of the text: broken, not cut


def test_the_loss_is_waited_for_only_when_a_line_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    class Loss:
        looked = 0

        def __float__(self) -> float:
            Loss.looked += 1
            return 0.5

    monkeypatch.setattr(progress_module, "perf_counter", Clock(0.001))
    engine = engine_of()
    loss: Any = Loss()
    for settings in ({"console": terminal()}, {"console": plain()}, {"quiet": True}):
        with Progress(engine, **settings) as progress:  # type: ignore[arg-type]
            for _ in range(30):
                engine.step(torch.ones(3, 4))
                progress.update(loss)
    assert Loss.looked == 4  # first and last where something is shown


def test_skipped_updates_are_counted(tmp_path: Path) -> None:
    engine, console = engine_of(), plain()
    with Progress(engine, steps=2, metrics=tmp_path / "m.jsonl", console=console) as progress:
        train(engine, progress, 1)
        with pytest.warns(UserWarning, match="not finite"):
            train(engine, progress, 1, factor=float("nan"))
    assert "step 2/2  loss nan  1 skipped" in shown(console)
    rows = read_metrics(tmp_path / "m.jsonl")
    assert [row["skipped"] for row in rows] == [0, 1]
    assert rows[1]["loss"] is None
    assert "NaN" not in (tmp_path / "m.jsonl").read_text()


def test_the_metrics_of_a_step(tmp_path: Path) -> None:
    engine = engine_of(lr=lambda step: 0.1 / (1 + step))
    path = tmp_path / "new" / "m.jsonl"
    losses = []
    with Progress(engine, metrics=path, quiet=True) as progress:
        for _ in range(3):
            before = engine._run.store.traffic.up_nbytes
            losses.append(engine.step(torch.ones(3, 4)))
            progress.update(losses[-1], tokens=12)
            last = json.loads(path.read_text().splitlines()[-1])  # every line is there at once
            assert last["up_nbytes"] == engine._run.store.traffic.up_nbytes - before > 0
    rows = read_metrics(path)
    assert [[*row] for row in rows] == [[*FIELDS, "lr"]] * 3
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert [row["loss"] for row in rows] == [float(loss) for loss in losses]
    assert [row["lr"] for row in rows] == [0.1, 0.1 / 2, 0.1 / 3]
    assert rows[2]["device_peak_nbytes"] == engine.ledger.peak_nbytes > 0
    assert rows[2]["host_nbytes"] == engine._run.store.host_nbytes()
    assert rows[2]["tokens_per_second"] == pytest.approx(12 / rows[2]["seconds"])
    assert rows[2]["down_nbytes"] > 0


def test_a_resumed_run_has_every_step_once(tmp_path: Path) -> None:
    engine, path = engine_of(), tmp_path / "m.jsonl"
    with Progress(engine, metrics=path, quiet=True) as progress:
        train(engine, progress, 3)
        engine.save(tmp_path / "checkpoint")
        train(engine, progress, 3)
    before = path.read_text().splitlines()
    with path.open("a") as file:
        file.write('{"step": 6, "lo')  # killed while writing
    again = engine_of()
    again.load(tmp_path / "checkpoint")
    with Progress(again, metrics=path, quiet=True) as progress:
        assert path.read_text().splitlines() == before[:3]
        train(again, progress, 2)
        again.load(tmp_path / "checkpoint")  # back within the run
        train(again, progress, 4)
    rows = read_metrics(path)
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4, 5, 6]
    assert path.read_text().splitlines()[:3] == before[:3]
    assert [row["loss"] for row in rows[:6]] == [json.loads(line)["loss"] for line in before]
    assert sorted(os.listdir(tmp_path)) == ["checkpoint", "m.jsonl"]


@pytest.mark.parametrize("tail", ['{"ste', "{", '{"step": 2, "loss": 0.', "\0\0\0", '{"step": 2\0\0', "\n"])
def test_half_a_line_is_dropped(tmp_path: Path, tail: str) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 0}\n{"step": 1}\n' + tail)
    assert read_metrics(path) == [{"step": 0}, {"step": 1}]
    file = MetricsFile(path, 5)
    file.write({"step": 5})
    file.close()
    assert path.read_text() == '{"step": 0}\n{"step": 1}\n{"step": 5}\n'


def test_a_last_line_that_only_lacks_its_end_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 0}\n{"step": 1}')
    file = MetricsFile(path, 2)
    file.write({"step": 2})
    file.close()
    assert [row["step"] for row in read_metrics(path)] == [0, 1, 2]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"step": 0}\nhello\n{"step": 1}\n', r"m\.jsonl, line 2: b'hello' is no line of a metrics file"),
        ("hello", "line 1: b'hello'"),
        ('{"a": 1}', "line 1: .* with a 'step'"),
        ("[1]\n", "line 1"),
        ('{"step": 0, "lo\n{"step": 1}\n', "line 1"),
    ],
)
def test_files_of_others_are_not_touched(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text(text)
    for call in (lambda: read_metrics(path), lambda: MetricsFile(path, 0)):
        with pytest.raises(RunError, match=words):
            call()
    assert path.read_text() == text


def test_paths_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"metrics file .*none\.jsonl cannot be read: No such file"):
        read_metrics(tmp_path / "none.jsonl")
    (tmp_path / "file").touch()
    with (
        pytest.raises(RunError, match=r"metrics file .*m\.jsonl cannot be written: "),
        Progress(engine_of(), metrics=tmp_path / "file" / "m.jsonl", quiet=True),
    ):
        pass


def test_a_full_disk_ends_the_file_and_not_the_run() -> None:
    if not Path("/dev/full").exists():
        pytest.skip("there is no /dev/full")
    engine = engine_of()
    with Progress(engine, quiet=True) as progress:
        progress._file = file = MetricsFile.__new__(MetricsFile)
        file.path, file._next, file._file = Path("/dev/full"), 0, open("/dev/full", "w")  # noqa: SIM115
        with pytest.warns(UserWarning, match="step 0: /dev/full: .*No space left on device; no more metrics are written"):
            train(engine, progress, 1)
        train(engine, progress, 1)
    assert engine.optimizer.steps == 2


def test_only_the_first_rank_shows_and_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, console = engine_of(), plain()
    real = engine._run.wire
    monkeypatch.setattr(engine._run, "wire", SimpleNamespace(rank=1, world=2))
    progress = Progress(engine, metrics=tmp_path / "m.jsonl", console=console)
    monkeypatch.setattr(engine._run, "wire", real)
    with progress:
        train(engine, progress, 2)
    assert shown(console) == ""
    assert not (tmp_path / "m.jsonl").exists()


def test_outside_of_its_block() -> None:
    with pytest.raises(RunError, match=r"with scrimp\.Progress\(engine\) as progress"):
        Progress(engine_of()).update(1.0)


def test_after_an_error_the_terminal_is_given_back(tmp_path: Path) -> None:
    engine, console = engine_of(), terminal()
    with suppress(ZeroDivisionError), Progress(engine, metrics=tmp_path / "m.jsonl", console=console) as progress:
        train(engine, progress, 2)
        raise ZeroDivisionError
    assert "\x1b[?25h" in shown(console)  # the cursor
    assert len(read_metrics(tmp_path / "m.jsonl")) == 2


def test_the_engine_alone_does_not_load_rich() -> None:
    code = "import scrimp; scrimp.Engine; import sys; assert 'rich' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[3])
