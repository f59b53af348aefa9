"""Models built on meta: with weights from outside, or made by the model's own means; never two copies; what is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from scrimp import zoo
from scrimp.engine import Engine, Memory
from scrimp.errors import RunError
from scrimp.ext.ranks import pool
from tests.engine.test_engine import everything
from tests.rank_jobs import engine as jobs

ROOT = Path(__file__).parents[3]


def on_meta(name: str) -> nn.Module:
    with torch.device("meta"):
        return zoo.build(name)


def engine_for(model: nn.Module, **kwargs: Any) -> Engine:
    return Engine(model, memory=Memory(device="1GiB"), device="cpu", **kwargs)


def stored(model: nn.Module) -> dict[str, torch.Tensor]:
    """What a file holds: a tied parameter once."""
    persistent = model.state_dict()
    return {
        **dict(model.named_parameters()),
        **{name: buffer for name, buffer in model.named_buffers() if name in persistent},
    }


def write_folder(folder: Path, tensors: dict[str, torch.Tensor], shards: int) -> None:
    names, files = list(tensors), {}
    for k in range(shards):
        file = f"model-{k + 1:05}-of-{shards:05}.safetensors"
        save_file({name: tensors[name].detach() for name in names[k::shards]}, folder / file)
        files.update(dict.fromkeys(names[k::shards], file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))


@pytest.mark.parametrize("form", ["state dict", "file", "folder", "shards", "index"])
@pytest.mark.parametrize("name", ["gpt-tiny", "llama-tiny", "resnet-tiny"])
def test_the_weights_are_those_given(name: str, form: str, tmp_path: Path) -> None:
    """The GPT has a tied head that no file holds, the Llama buffers that none holds, the ResNet buffers that all hold."""
    torch.manual_seed(0)
    model = zoo.build(name)
    with torch.no_grad():
        for buffer in model.buffers():
            if buffer.is_floating_point() and name == "resnet-tiny":
                buffer.uniform_()
    source: Any = tmp_path
    if form == "state dict":
        source = model.state_dict()
    elif form in ("file", "folder"):
        save_file({key: value.detach() for key, value in stored(model).items()}, tmp_path / "model.safetensors")
        source = str(tmp_path / "model.safetensors") if form == "file" else tmp_path
    else:
        write_folder(tmp_path, stored(model), shards=3)
        source = tmp_path / "model.safetensors.index.json" if form == "index" else tmp_path
    want = {**model.state_dict(), **dict(model.named_buffers())}
    for target in (on_meta(name), zoo.build(name)):
        got = everything(engine_for(target, weights=source))
        assert {*got} == {*want}
        assert all(torch.equal(got[key], want[key]) for key in want)


def test_a_file_in_bf16_and_a_state_dict_in_fp64() -> None:
    model = zoo.build("gpt-tiny")
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        state = {key: value.to(dtype) for key, value in model.state_dict().items()}
        got = engine_for(on_meta("gpt-tiny"), weights=state).state_dict()
        assert all(torch.equal(got[key], state[key].float()) for key in state)


def test_ranks_read_the_same(tmp_path: Path) -> None:
    model = zoo.build("gpt-tiny")
    save_file({key: value.detach() for key, value in stored(model).items()}, tmp_path / "model.safetensors")
    for got in pool(2).run(jobs.weights_of, "gpt-tiny", str(tmp_path)):
        assert all(torch.equal(got[key], value) for key, value in model.state_dict().items())


@pytest.mark.full
def test_no_second_copy_of_the_model(tmp_path: Path) -> None:
    """209 M parameters: a copy in fp32, or the file's pages if they stayed, would be 838 MB."""
    path = tmp_path / "model.safetensors"
    command = [sys.executable, "-m", "tests.rank_jobs.memory"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([*command, "write", str(path)], check=True, cwd=ROOT, env=environment)
    done = subprocess.run([*command, "read", str(path)], check=True, cwd=ROOT, env=environment, capture_output=True, text=True)
    count, arenas, rise = map(int, done.stdout.split())
    assert count > 200e6
    assert arenas <= 14.01 * count
    written = 6 * count  # weights and masters; states are zero, and take no memory until the first update
    assert 0.9 * written <= rise <= written + 100e6


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 4)
        self.register_buffer("mean", torch.zeros(4))


def state(**changes: torch.Tensor | None) -> dict[str, Any]:
    full = {**Plain().state_dict(), **{key.replace("_", "."): value for key, value in changes.items()}}
    return {key: value for key, value in full.items() if value is not None}


def damaged(folder: Path, kind: str) -> Path:
    """A folder of a Plain, and what is wrong with it."""
    tensors = Plain().state_dict()
    write_folder(folder, tensors, shards=2)
    index, second = folder / "model.safetensors.index.json", folder / "model-00002-of-00002.safetensors"
    match kind:
        case "cut off":
            second.write_bytes(second.read_bytes()[:-8])
        case "no shard":
            second.unlink()
        case "no map":
            index.write_text("{}")
        case "no json":
            index.write_text('{"weight_map": {')
        case "not in the shard":
            save_file({"up.weight": tensors["up.weight"]}, second)
        case "elsewhere":
            index.write_text(json.dumps({"weight_map": {"up.weight": "../secret.safetensors"}}))
        case "pickled":
            index.unlink()
            (folder / "pytorch_model.bin").touch()
        case "checkpoint":
            index.unlink()
            (folder / "manifest.json").touch()
        case "empty":
            for path in folder.iterdir():
                path.unlink()
    return folder


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        (state(up_bias=None, down_bias=None), ["Plain", "2 missing (up.bias, down.bias)", "none unexpected", "5", "3"]),
        (state(mean=None), ["1 missing (mean)"]),
        (state(left_over=torch.ones(1)), ["none missing", "1 unexpected (left.over)"]),
        (state(up_bias=None, bias=torch.ones(8)), ["1 missing (up.bias)", "1 unexpected (bias)"]),
        (state(up_bias=torch.ones(9)), ["up.bias is [8] in the model and [9] in the weights"]),
        (state(up_bias=torch.ones(8, dtype=torch.int8)), ["up.bias", "torch.int8", "quantised"]),
        ({"up.weight": [1.0]}, ["weights['up.weight']", "list"]),
        (nn.Linear(4, 8, device="meta").state_dict(), ["weights['weight']", "meta"]),
        (7, ["weights=int", "folder"]),
        ("no/such/place", ["no/such/place", "no such file", "not downloaded"]),
    ],
)
def test_weights_that_do_not_fit_are_refused(weights: Any, words: list[str]) -> None:
    with pytest.raises(RunError) as caught:
        engine_for(Plain(), weights=weights)
    for word in words:
        assert word in str(caught.value), str(caught.value)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("cut off", ["model-00002-of-00002.safetensors", "is damaged", "bytes"]),
        ("no shard", ["model-00002-of-00002.safetensors is missing", "2 tensors"]),
        ("no map", ["index.json is damaged", "weight_map"]),
        ("no json", ["index.json is damaged", "JSONDecodeError"]),
        ("not in the shard", ["says that", "model-00002-of-00002.safetensors, which does not have it"]),
        ("elsewhere", ["'../secret.safetensors'", "not in its own folder"]),
        ("pickled", ["pytorch_model.bin is pickled", "convert", "save_file"]),
        ("checkpoint", ["checkpoint of scrimp", "engine.load"]),
        ("empty", ["neither model.safetensors nor", "nothing"]),
    ],
)
def test_damaged_folders_are_refused(kind: str, words: list[str], tmp_path: Path) -> None:
    with pytest.raises(RunError) as caught:
        engine_for(Plain(), weights=damaged(tmp_path, kind))
    for word in words:
        assert word in str(caught.value), str(caught.value)


def test_pickled_files_are_never_opened(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(b"not even a pickle")
    with pytest.raises(RunError, match=r"model\.pt is pickled.*convert.*'model\.safetensors'"):
        engine_for(Plain(), weights=path)


def test_tied_weights_that_differ_are_refused() -> None:
    weights = zoo.build("gpt-tiny").state_dict()
    weights["head.weight"] = weights["head.weight"] + 1
    with pytest.raises(RunError, match=r"embed\.weight and head\.weight are one parameter of the model, but differ"):
        engine_for(on_meta("gpt-tiny"), weights=weights)
