"""The configuration: origins, every wrong key and value, keys without effect, and what is written is read again."""

from __future__ import annotations

from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest

from scrimp.errors import ScrimpError
from scrimp.train import SECTIONS, Resolved, keys_of, literal, read_config, to_toml
from tests.train.runs import TOML, written


def read(folder: Path, *settings: str, toml: str = TOML) -> Resolved:
    return read_config(written(folder, toml), settings)


def origin_of(resolved: Resolved, line: str) -> str:
    section = "model" if "." in line else "train"
    return resolved.origins[f"{section}.{line.partition(' ')[0]}"]


def test_every_value_has_its_origin(tmp_path: Path) -> None:
    resolved = read(tmp_path, "train.steps=9", "model.settings.layers=2", "data.seq=16")
    assert resolved.config.train.steps == 9
    assert resolved.config.model.settings == {"vocab": 256, "layers": 2, "dropout": 0.1}
    assert resolved.config.data.text == (str(tmp_path / "text.txt"),)
    for key, origin in {
        "train.steps": "--set", "train.batch": "config.toml", "train.seed": "default", "model.settings.layers": "--set",
        "model.settings.vocab": "config.toml", "data.seq": "--set",
    }.items():  # fmt: skip
        assert resolved.origins[key] == origin
    lines = to_toml(resolved).splitlines()
    for line in ("steps = 9", "batch = 4", "seed = 0", "settings.layers = 2"):
        (found,) = [each for each in lines if each.startswith(line)]
        assert found.endswith(f"# {origin_of(resolved, line)}")
    assert any(line.startswith("# clip_norm is not set") and line.endswith("# default") for line in lines)


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    settings = ('optimizer.groups=[{params = "*norm*", weight_decay = 0.0}]', "optimizer.betas=[0.9, 0.95]", "train.clip_norm=1")
    resolved = read(tmp_path, *settings)
    (tmp_path / "again").mkdir()
    (tmp_path / "again" / "config.toml").write_text(to_toml(resolved))
    assert read_config(tmp_path / "again" / "config.toml").config == resolved.config


@pytest.mark.parametrize("value", ['a "quoted" \\ text\n', "é\x7f", 1, 1.5, 1e-7, True, ("a", "b"), ({"a b": 1, "c": (1, 2)},)])
def test_literals_are_toml(value: Any) -> None:
    import tomllib

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(each) for key, each in value.items()}
        return [plain(each) for each in value] if isinstance(value, tuple) else value

    assert tomllib.loads(f"value = {literal(value)}")["value"] == plain(value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("steps = 6", "stepz = 6"), r"config.toml: \[train\] has no key 'stepz'; did you mean 'steps'\?"),
        (("steps = 6", "frobnicate = 6"), r"\[train\] has no key 'frobnicate'; it has steps, batch, micro_batches"),
        (("[train]", "[trian]"), r"there is no section \[trian\]; did you mean 'train'\?"),
        (("[model]", "steps = 3\n[model]"), r"'steps' is in no section; write it below \[train\]"),
        (("[model]", "train = 3\n[model]"), r"'train' is the number 3; it must be a section, \[train\]|declare|overwrite"),
        (("steps = 6", "steps = 'ten'"), r"\[train\] steps is the text 'ten'; it must be a whole number of 1 or more"),
        (("steps = 6", "steps = 0"), r"\[train\] steps is the number 0; it must be a whole number of 1"),
        (("steps = 6", "steps = true"), r"\[train\] steps is true; it must be a whole number"),
        (("lr = 1e-2", "lr = -1"), r"\[optimizer\] lr is the number -1; it must be a number from 0"),
        (("lr = 1e-2", "lr = 1e-2\nmomentum = 0.9"), r"\[optimizer\] momentum has no effect with name = 'adamw'; leave it out"),
        (('kind = "cosine"', 'kind = "cosin"'), r"\[schedule\] kind is the text 'cosin'; it must be 'constant', 'linear'"),
        (("warm_up = 2", "warm_up = 7"), r"warm_up is 7 steps, and \[train\] steps is 6"),
        (('device = "64MiB"', 'device = "64 lots"'), r"\[memory\] device is the text '64 lots'; it must be 'auto', or a size"),
        (('text = "text.txt"', ""), r"\[data\] takes exactly one of text, tokens, dataset, function; it has none of them"),
        (('text = "text.txt"', 'text = "text.txt"\nfunction = "a:b"'), r"exactly one of .*; it has text and function"),
        (('text = "text.txt"', 'text = "text.txt"\nsplit = "train"'), r"\[data\] split has no effect with text"),
        (('name = "gpt-tiny"', ""), r"config.toml: \[model\] name is missing; it is a model of the zoo"),
        (("batch = 4", "batch = 4\nmicro_batches = 3"), r"\[train\] batch is 4, which 3 micro_batches do not divide"),
        (("every = 3\nbatches = 2", "every = 0\nbatches = 2"), r"\[validation\] batches has no effect with every = 0"),
        (("[model]", "[model"), "config.toml is not TOML"),
    ],
)  # fmt: skip
def test_wrong_input_names_both_sides(change: tuple[str, str], words: str, tmp_path: Path) -> None:
    assert change[0] in TOML
    with pytest.raises(ScrimpError, match=words):
        read(tmp_path, toml=TOML.replace(*change, 1))


def test_a_switch_by_set_leaves_keys_of_the_file(tmp_path: Path) -> None:
    """The file has validation.batches and schedule.warm_up; a key that --set gives itself must have an effect."""
    assert read(tmp_path, "validation.every=0").config.validation.every == 0
    with pytest.raises(ScrimpError, match=r"--set: \[validation\] batches has no effect with every = 0"):
        read(tmp_path, "validation.every=0", "validation.batches=3")


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("train.stepz=3", r"--set train.stepz=3: \[train\] has no key 'stepz'; did you mean 'steps'\?"),
        ("steps=3", r"--set steps=3: write section.key=value, such as train.steps=3"),
        ("trian.steps=3", r"--set trian.steps=3: there is no section \[trian\]; did you mean 'train'"),
        ("train.steps=many", r"--set train.steps=many: \[train\] steps is the text 'many'; it must be a whole number"),
        ("train.steps", r"write it as name=value"),
    ],
)
def test_wrong_settings(setting: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ScrimpError, match=words):
        read(tmp_path, setting)


def test_paths_are_those_of_the_file_or_of_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    resolved = read(tmp_path / "there", 'memory.disk="tier"')
    assert resolved.config.data.text == (str(tmp_path / "there" / "text.txt"),)
    assert resolved.config.run.folder == str(tmp_path / "here" / "run")
    assert resolved.config.memory.disk == str(tmp_path / "here" / "tier")
    assert read(tmp_path / "there", "data.text=*.md").config.data.text == (str(tmp_path / "here" / "*.md"),)
    assert resolved.config.model.name == "gpt-tiny"  # no such file: a name of the zoo


@pytest.mark.parametrize("name", SECTIONS)
def test_defaults_are_possible_values(name: str) -> None:
    for each in fields(SECTIONS[name]):
        key = keys_of(SECTIONS[name])[each.name]
        assert key.meaning.endswith("."), each.name
        if each.default not in (None, (), MISSING):
            assert key.accepts(each.default), each.name
