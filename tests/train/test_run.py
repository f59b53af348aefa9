"""Runs of one rank: the folder, resuming bit by bit, signals, checkpoints that are kept, refusals before training."""

from __future__ import annotations

import json
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from scrimp.engine import Engine
from scrimp.errors import CheckpointError, FitError, RunError, ScrimpError
from scrimp.train import AUTO, NEW, RESUME, read_config, train
from scrimp.train import run as run_module
from scrimp.train.loop import Loop
from scrimp.train.model.build import model_to_train
from scrimp.train.schedule import Curve, Named
from tests.train.runs import TOML, figures, losses, run, written


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an uninterrupted run, beside its config.toml."""
    folder = tmp_path_factory.mktemp("finished")
    config = written(folder)
    outcome = run(config, "metrics.report=true", "metrics.tensorboard=true", folder=folder / "run")
    assert (outcome.steps, outcome.signal) == (6, 0)
    return folder / "run"


def test_a_run_folder_has_everything(finished: Path) -> None:
    names = {path.name for path in finished.iterdir()}
    assert names >= {"config.toml", "run.json", "machine.json", "metrics.jsonl", "checkpoints", "report.html", "tensorboard"}
    assert [path.name for path in sorted((finished / "checkpoints").iterdir())] == ["step-00000004", "step-00000006"]
    rows = losses(finished)
    page = (finished / "report.html").read_text()
    (series,) = re.findall(r'"name": ?"validation loss".*?"x": ?\[([^\]]*)\], ?"y": ?\[([^\]]*)\]', page)
    assert [[float(value) for value in each.split(",")] for each in series] == [[2, 5], [rows[2][2], rows[5][2]]]
    assert [row[0] for row in rows] == [*range(6)]
    assert [row[2] is not None for row in rows] == [False, False, True, False, False, True]
    assert rows[0][3] == pytest.approx(1e-2 / 2)
    assert rows[5][1] < rows[0][1]
    extra = json.loads((finished / "checkpoints" / "step-00000004" / "manifest.json").read_text())["extra"]["train"]
    assert (extra["step"], extra["samples"]) == (4, 16)


def cut(finished: Path, folder: Path, step: int = 4) -> Path:
    """The folder as if the run had been killed after a checkpoint."""
    shutil.copytree(finished, folder)
    for path in (folder / "checkpoints").iterdir():
        if path.name > f"step-{step:08d}":
            shutil.rmtree(path)
    return folder


def test_a_resumed_run_is_the_same_bit_by_bit(finished: Path, tmp_path: Path) -> None:
    """The model has dropout, so this holds for the random state too."""
    folder = cut(finished, tmp_path / "run")
    outcome = run(finished.parent / "config.toml", how=RESUME, folder=folder)
    assert outcome.steps == 6
    assert losses(folder) == losses(finished)


def test_the_saved_configuration_resumes_too(finished: Path, tmp_path: Path) -> None:
    folder = cut(finished, tmp_path / "run")
    run(folder / "config.toml", "train.steps=7", how=RESUME, folder=folder)
    assert [row[0] for row in losses(folder)] == [*range(7)]
    assert losses(folder)[:4] == losses(finished)[:4]


def test_checkpoints_in_the_background_resume_bit_by_bit(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[bool] = []
    own = Engine.save

    def save(engine: Engine, folder: Path, **given: Any) -> None:
        waits.append(given["wait"])
        own(engine, folder, **given)

    monkeypatch.setattr(Engine, "save", save)
    config = written(tmp_path)
    run(config, "checkpoint.background=true", folder=tmp_path / "run")
    assert waits == [False, False, True]  # the last one is complete before the run ends
    assert [path.name for path in sorted((tmp_path / "run" / "checkpoints").iterdir())] == ["step-00000004", "step-00000006"]
    assert losses(tmp_path / "run") == losses(finished)
    folder = cut(tmp_path / "run", tmp_path / "again")
    run(config, "checkpoint.background=true", how=RESUME, folder=folder)
    assert losses(folder) == losses(finished)


def test_auto_begins_and_goes_on(tmp_path: Path) -> None:
    config = written(tmp_path)
    assert run(config, "train.steps=2", "schedule.kind=constant", how=AUTO, folder=tmp_path / "run").steps == 2
    assert run(config, "train.steps=3", "schedule.kind=constant", how=AUTO, folder=tmp_path / "run").steps == 3
    assert len(losses(tmp_path / "run")) == 3


def test_restarted_workers_resume_by_themselves(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = cut(finished, tmp_path / "run")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert run(finished.parent / "config.toml", how=NEW, folder=folder).steps == 6
    assert losses(folder) == losses(finished)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_the_run_goes_on(number: int, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The signal comes within the third step."""
    folder, before = tmp_path / "run", signal.getsignal(number)
    step = Loop.step

    def signalled(self: Loop, args: Any, kwargs: Any) -> torch.Tensor:
        if self.steps == 2:
            signal.raise_signal(number)
        return step(self, args, kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Loop, "step", signalled)
        outcome = run(finished.parent / "config.toml", folder=folder)
    assert (outcome.steps, outcome.signal) == (3, number)
    assert outcome.checkpoint == folder / "checkpoints" / "step-00000003"
    assert signal.getsignal(number) is before
    run(finished.parent / "config.toml", how=RESUME, folder=folder)
    assert figures(folder, "step", "loss", "lr") == figures(finished, "step", "loss", "lr")


def test_a_signal_before_the_first_step_saves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = run_module.open_data

    def signalled(*args: Any, **more: Any) -> Any:
        signal.raise_signal(signal.SIGTERM)
        return opened(*args, **more)

    monkeypatch.setattr(run_module, "open_data", signalled)
    outcome = run(written(tmp_path), folder=tmp_path / "run")
    assert (outcome.steps, outcome.signal, outcome.checkpoint) == (0, signal.SIGTERM, None)
    assert not (tmp_path / "run").exists()


def test_refusals(finished: Path, tmp_path: Path) -> None:
    config = finished.parent / "config.toml"
    with pytest.raises(RunError, match=r"run has a run: go on with it by scrimp train --resume .*, or give another folder"):
        run(config, folder=finished)
    with pytest.raises(RunError, match="has no complete checkpoint in checkpoints/"):
        run(config, how=RESUME, folder=tmp_path / "none")
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(RunError, match="has other files and no run"):
        run(config, folder=tmp_path)
    with pytest.raises(ScrimpError, match=r"data\] seq is 64, and gpt-tiny has positions for 32"):
        run(config, "data.seq=64", folder=tmp_path / "new")
    with pytest.raises(ScrimpError, match=r"bert-tiny reads no text: give it samples by \[data\] function"):
        run(written(tmp_path / "b", TOML.replace("gpt-tiny", "bert-tiny")), folder=tmp_path / "new")
    with pytest.raises(ScrimpError, match=r"gpt-tiny has no setting layerz.*did you mean layers"):
        run(config, "model.settings.layerz=3", folder=tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        (
            "train.batch=2",
            r"\[train\] batch was 4 when the checkpoint was written, and is 2 now: the resumed run would see other",
        ),
        ("train.seed=1", r"\[train\] seed was 0 .* and is 1 now"),
        ("data.seq=16", r"\[data\] seq was 32 .* and is 16 now"),
        ("validation.share=0.25", r"the number of training samples was \d+ .* and is \d+ now"),
    ],
)
def test_a_resumed_run_with_other_samples_is_refused(setting: str, words: str, finished: Path, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=words):
        run(finished.parent / "config.toml", setting, how=RESUME, folder=cut(finished, tmp_path / "run"))


def test_a_resumed_run_of_another_model_is_refused(finished: Path, tmp_path: Path) -> None:
    with pytest.raises((RunError, CheckpointError), match="another model"):
        run(finished.parent / "config.toml", "model.settings.layers=2", how=RESUME, folder=cut(finished, tmp_path / "run"))


def test_a_changed_weight_decay_takes_effect(finished: Path, tmp_path: Path) -> None:
    one, other = cut(finished, tmp_path / "one"), cut(finished, tmp_path / "other")
    run(finished.parent / "config.toml", "optimizer.weight_decay=0.01", how=RESUME, folder=one)
    run(finished.parent / "config.toml", "optimizer.weight_decay=0.9", how=RESUME, folder=other)
    assert losses(one) == losses(finished)  # the default
    assert losses(one)[:5] == losses(other)[:5]
    assert losses(one)[5] != losses(other)[5]


def test_dry_runs_write_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With a plan; the help's examples have one without."""
    config = written(tmp_path)
    dry(config, "cluster.plan=auto", "cluster.name=2xCPU", "cluster.mesh=x=2", "cluster.time_limit=2")
    text = capsys.readouterr().out
    assert re.search(r"^mesh +x=2$", text, re.M)
    assert re.search(r"predicted peak of a device [\d.]+ KiB \([\d,]+ bytes, on rank \d, in .*\); step [\d.]+ s", text)
    assert "budget of a device: 64.0 MiB; within it" in text
    assert "host memory: needs" in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.toml", "text.txt"]


def test_a_dry_run_for_another_cluster_counts_its_host_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = written(tmp_path)
    for name, host in (("large", "1GiB"), ("small", "9KiB")):
        (tmp_path / f"{name}.toml").write_text(f"nodes = 2\ndevices_per_node = 1\nkind = '24GiB'\n[host]\nmemory = '{host}'\n")
    settings = ("cluster.name={}.toml", "memory.device=2KiB")
    with pytest.raises(FitError, match=r"before the run: host memory needs \d+\.\d KiB or more, 9.0 KiB free"):
        dry(config, *(each.format(tmp_path / "small") for each in settings))
    assert "predicted peak of a device with the least-memory plan on 2 24GiB" in capsys.readouterr().out
    dry(config, *(each.format(tmp_path / "large") for each in settings))
    assert "the preflight is for 2 24GiB; disks and torch are those of this machine" in capsys.readouterr().out


def dry(config: Path, *settings: str) -> None:
    train(read_config(config, [*settings, f"run.folder={config.parent / 'run'}"]), dry_run=True)


def test_models_and_data_of_functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine_for_train.py").write_text(
        "import torch\nfrom scrimp import zoo\n"
        "def model():\n    torch.manual_seed(0)\n    return zoo.build('vit-tiny')\n"
        "class Data:\n    def __len__(self):\n        return 12\n"
        "    def __getitem__(self, k):\n        return torch.full((3, 32, 32), k / 12), torch.tensor(k % 10)\n"
        "def rate(step):\n    return 1 / (1 + step)\n"
    )
    (tmp_path / "config.toml").write_text(
        '[model]\nname = "mine_for_train:model"\n[data]\nfunction = "mine_for_train:Data"\n[train]\nsteps = 4\nbatch = 4\n'
        'device = "cpu"\nprecision = "fp32"\n[memory]\ndevice = "64MiB"\n[schedule]\nkind = "mine_for_train:rate"\nwarm_up = 2\n'
        '[optimizer]\nname = "sgd"\nlr = 0.5\nmomentum = 0.9\n[metrics]\nreport = false\n'
    )
    monkeypatch.chdir(tmp_path)
    run(tmp_path / "config.toml", folder=tmp_path / "run")
    assert figures(tmp_path / "run", "lr") == [(0.25,), (0.25,), (0.5 / 3,), (0.125,)]
    with pytest.raises(RunError, match=r"mine_for_train:rate\(1\) returned -1; it must return a factor from 0"):
        Named(name="mine_for_train:rate", function=lambda step: -1, warm_up=0)(1)


def test_a_folder_of_hugging_face(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "hf")
    toml = TOML.replace('name = "gpt-tiny"\nsettings = { vocab = 256, layers = 1, dropout = 0.1 }', 'name = "hf"\nweights = "hf"')
    made = written(tmp_path, toml.replace('text = "text.txt"', 'text = "text.txt"\nseq = 24'))
    assert run(made, "train.steps=2", folder=tmp_path / "run").steps == 2
    first = losses(tmp_path / "run")[0][1]
    assert run(made, "train.steps=2", "train.seed=0", folder=tmp_path / "again").steps == 2
    assert losses(tmp_path / "again")[0][1] == first
    with pytest.raises(ScrimpError, match=r"\[model.settings\] num_layers=3: the config in .* has no num_layers"):
        run(made, "model.settings.num_layers=3", folder=tmp_path / "wrong")


def test_settings_of_the_zoo_may_be_lists() -> None:
    built = model_to_train("resnet-tiny", {"stages": [1, 2], "classes": 7})
    assert 7 in {len(each) for each in built.model.parameters()}
    assert not built.reads
    built = model_to_train("vgg-tiny", {"stages": [[8], [16, 16]], "batch_norm": True})
    assert all(each.is_meta for each in built.model.parameters())


@pytest.mark.parametrize(
    ("kind", "final", "expected"),
    [
        ("constant", 0.0, [0.5, 1, 1, 1, 1, 1]), ("linear", 0.25, [0.5, 1, 1, 0.75, 0.5, 0.25]),
        ("cosine", 0.0, [0.5, 1, 1, 0.75, 0.25, 0]),
    ],
)  # fmt: skip
def test_schedules(kind: str, final: float, expected: list[float]) -> None:
    curve = Curve(kind=kind, warm_up=2, final=final, steps=6)
    assert [curve(step) for step in range(6)] == pytest.approx(expected)
    assert curve(100) == pytest.approx(final if kind != "constant" else 1)
