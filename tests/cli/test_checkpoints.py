"""`scrimp checkpoint`: faults by file and tensor, what it shows, files for other ranks, exports, the examples of its help."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner, Result

from scrimp.cli._app import app
from tests.checkpoint.test_checkpoint import flip
from tests.engine.test_engine import batches_of, engine_for, model_of, run


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "checkpoints" / "step-00000100"
    engine = engine_for(model_of("gpt-tiny"))
    run(engine, batches_of("gpt-tiny")[:1])
    engine.save(folder, extra={"position": 7})
    engine.close()
    return folder


def scrimp(*words: object, code: int = 0) -> Result:
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == code, result.output
    return result


def test_verify(saved: Path, tmp_path: Path) -> None:
    assert "1 file, " in " ".join(scrimp("checkpoint", "verify", saved).output.split())
    damaged = tmp_path / "ckpt"
    shutil.copytree(saved, damaged)
    for place in (0.3, 0.9):
        flip(damaged / "rank-0.safetensors", place)
    said = " ".join(scrimp("checkpoint", "verify", damaged, code=1).output.split())
    found = re.findall(r"rank-0\.safetensors is damaged: tensor (\S+) ", said)
    assert len({*found}) == 2
    (damaged / "rank-0.safetensors").unlink()
    assert "rank-0.safetensors is missing" in " ".join(scrimp("checkpoint", "verify", damaged, code=1).output.split())
    assert "there is no such folder" in scrimp("checkpoint", "verify", tmp_path / "none", code=2).output
    assert "has no manifest.json" in " ".join(scrimp("checkpoint", "verify", tmp_path, code=1).output.split())


def test_inspect(saved: Path) -> None:
    data = json.loads(scrimp("checkpoint", "inspect", saved, "--json").output)
    numel = sum(parameter.numel() for parameter in model_of("gpt-tiny").parameters())
    assert (data["step"], data["ranks"], data["parameters"], data["trained"]) == (1, 1, numel, numel)
    assert (data["format"], data["extra"], data["precision"]) == ("scrimp.checkpoint version 4", {"position": 7}, "bf16")
    assert data["nbytes"] == (saved / "rank-0.safetensors").stat().st_size
    text = " ".join(scrimp("checkpoint", "inspect", saved).output.split())
    for words in (f"{numel:,} in", "AdamW, 2 states in fp32", '{"position": 7}', "lr 0.003"):
        assert words in text


def test_reshard_and_export(saved: Path, tmp_path: Path) -> None:
    said = scrimp("checkpoint", "reshard", saved, tmp_path / "three", "--ranks", 3).output
    assert "left out: random state" in said
    names = sorted(path.name for path in (tmp_path / "three").iterdir())
    assert names == ["manifest.json", *(f"rank-{k}.safetensors" for k in range(3))]
    files = [tmp_path / "one.safetensors", tmp_path / "other.safetensors"]
    for folder, file in zip((saved, tmp_path / "three"), files, strict=True):
        scrimp("checkpoint", "export", folder, file, "--dtype", "fp32")
    one, other = map(load_file, files)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    for words, told in (
        (("export", saved, tmp_path / "hf"), "give files_from= (--files-from)"),
        (("export", saved, tmp_path / "x.safetensors", "--dtype", "fp8"), "dtype='fp8': give bf16, fp16 or fp32"),
        (("export", saved, tmp_path / "x.safetensors", "--max-shard", "big"), "'big' is not a size"),
        (("reshard", saved, tmp_path / "four", "--ranks", 0), "greater than or equal to 1"),
    ):
        assert told in " ".join(scrimp("checkpoint", *words, code=2).output.split())


@pytest.mark.parametrize("command", ["", "verify", "inspect", "reshard", "export"])
def test_the_examples_of_the_help_work(command: str, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    text = scrimp("checkpoint", *command.split(), "--help").output
    examples = re.findall(r"^[ │]+scrimp (checkpoint .*?)[ │]*$", text.partition("Examples")[2], re.MULTILINE)
    assert examples
    shutil.copytree(saved, tmp_path / "checkpoints" / saved.name)
    monkeypatch.chdir(tmp_path)
    for example in examples:
        scrimp(*example.split())
