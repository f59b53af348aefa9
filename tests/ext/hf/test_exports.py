"""Exports: transformers loads them with equal logits; from an engine and from a checkpoint; in bounded memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from scrimp import Engine, Memory, zoo
from scrimp.errors import CheckpointError
from scrimp.ext import hf
from scrimp.ext.ranks import pool
from tests.checkpoint import rank_jobs as jobs
from tests.engine.test_engine import batches_of, engine_for, model_of, run

IDS = torch.arange(24).view(2, 12) % 64


def small(kind: str) -> Any:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed (it is in the dev extra)")
    torch.manual_seed(0)
    if kind == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=64, n_embd=32, n_layer=2, n_head=2, n_positions=32, bos_token_id=0, eos_token_id=1
        )
        return transformers.GPT2LMHeadModel(config)
    common = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    if kind == "mixtral":
        config = transformers.MixtralConfig(**common, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2)
        return transformers.MixtralForCausalLM(config)
    config = transformers.LlamaConfig(**common, num_key_value_heads=1, tie_word_embeddings=kind == "tied")
    return transformers.LlamaForCausalLM(config)


def trained(kind: str, precision: str = "bf16", **settings: Any) -> Engine:
    engine = Engine(small(kind), memory=Memory(device="1GiB"), precision=precision, device="cpu", **settings)
    for _ in range(2):
        engine.step(input_ids=IDS, labels=IDS)
    return engine


def logits(engine: Engine) -> torch.Tensor:
    found: torch.Tensor = engine.evaluate(lambda: engine._run.model(input_ids=IDS).logits)
    return found


def loaded(folder: Path) -> Any:
    import transformers

    model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not [name for names in ("missing_keys", "unexpected_keys", "mismatched_keys") for name in info[names]]
    return model.eval()


@pytest.mark.parametrize("kind", ["gpt2", "llama", "tied", "mixtral"])
def test_transformers_loads_it_with_equal_logits(kind: str, tmp_path: Path) -> None:
    engine = trained(kind)
    want = logits(engine)
    files = hf.export(engine, tmp_path / "engine", max_shard="10KB")
    assert len(files) > 2
    names = json.loads((tmp_path / "engine" / "model.safetensors.index.json").read_text())["weight_map"]
    assert sorted({*names.values()}) == files
    assert ("lm_head.weight" in names) == (kind in ("llama", "mixtral"))
    model = loaded(tmp_path / "engine")
    assert model.dtype == torch.bfloat16
    assert torch.equal(model(input_ids=IDS).logits, want)
    engine.save(tmp_path / "ckpt")
    engine.close()
    assert hf.export(tmp_path / "ckpt", tmp_path / "folder", files_from=tmp_path / "engine") == ["model.safetensors"]
    assert torch.equal(loaded(tmp_path / "folder")(input_ids=IDS).logits, want)
    with torch.device("meta"):
        again = small(kind)
    back = Engine(again, weights=tmp_path / "folder", memory="1GiB", device="cpu")
    assert torch.equal(logits(back), want)
    back.close()


def test_the_dtype_is_the_one_that_was_wanted(tmp_path: Path) -> None:
    engine = trained("llama")
    masters = engine.state_dict()
    hf.export(engine, tmp_path / "all", dtype="fp32")
    hf.export(engine, tmp_path / "one.safetensors", dtype=torch.float16)
    assert json.loads((tmp_path / "all" / "config.json").read_text())["dtype"] == "float32"
    found, half = load_file(tmp_path / "all" / "model.safetensors"), load_file(tmp_path / "one.safetensors")
    assert found.keys() == half.keys() == masters.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, masters[name])
        assert torch.equal(half[name], masters[name].half())
    engine.close()


def test_config_and_tokenizer_files_come_along(tmp_path: Path) -> None:
    engine = trained("llama")
    source = tmp_path / "source"
    source.mkdir()
    kept = ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json")
    for name in (*kept, "model.safetensors", "notes.txt"):
        (source / name).write_text(json.dumps({"from": "source"}))
    hf.export(engine, tmp_path / "out", files_from=source)
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {*kept, "model.safetensors"}
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]  # the engine's model knows better than the folder
    engine.close()


def test_buffers_and_frozen_weights_of_any_model(tmp_path: Path) -> None:
    torch.manual_seed(0)
    engine = Engine(zoo.build("resnet-tiny"), memory="1GiB", device="cpu")
    engine.step(*zoo.example_batch("resnet-tiny", batch=4))
    hf.export(engine, tmp_path / "one.safetensors", dtype="fp32")
    engine.save(tmp_path / "ckpt")
    hf.export(tmp_path / "ckpt", tmp_path / "other.safetensors", dtype="fp32")
    one, other, state = load_file(tmp_path / "one.safetensors"), load_file(tmp_path / "other.safetensors"), engine.state_dict()
    assert one.keys() == other.keys() == state.keys()
    assert all(torch.equal(one[name], state[name]) and torch.equal(other[name], state[name]) for name in state)
    engine.close()


@pytest.mark.parametrize("planned", [False, pytest.param(True, marks=pytest.mark.full)])
def test_ranks_export_what_one_would(planned: bool, tmp_path: Path) -> None:
    from tests.lower.test_ranks import planned as planned_of

    plan = planned_of("gpt-tiny", {}, "x=2", "zero-3").to_json() if planned else None
    pool(2).run(jobs.exports, "gpt-tiny", plan, str(tmp_path), timeout_seconds=120)
    one, state = load_file(tmp_path / "one.safetensors"), torch.load(tmp_path / "state.pt")
    assert {*state} - {*one} == {"head.weight"}  # tied to the embedding
    assert all(torch.equal(one[name], state[name]) for name in one)


def test_what_makes_no_sense_is_refused(tmp_path: Path) -> None:
    engine = engine_for(model_of("gpt-tiny"))
    run(engine, batches_of("gpt-tiny")[:1])
    engine.save(tmp_path / "ckpt")
    with pytest.raises(CheckpointError, match=r"because the model has no config: give files_from= \(--files-from\) a"):
        hf.export(engine, tmp_path / "out")
    with pytest.raises(CheckpointError, match="because a checkpoint has no config"):
        hf.export(tmp_path / "ckpt", tmp_path / "out")
    with pytest.raises(CheckpointError, match=r"files_from='.*' has no config\.json"):
        hf.export(engine, tmp_path / "out", files_from=tmp_path)
    with pytest.raises(CheckpointError, match="dtype='fp8': give bf16, fp16 or fp32"):
        hf.export(engine, tmp_path / "one.safetensors", dtype="fp8")
    with pytest.raises(CheckpointError, match="exists, and is not an empty folder"):
        hf.export(engine, tmp_path / "ckpt", files_from=tmp_path)
    (tmp_path / "ckpt" / "rank-0.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"rank-0\.safetensors is damaged"):
        hf.export(tmp_path / "ckpt", tmp_path / "one.safetensors")
    assert {path.name for path in tmp_path.iterdir()} == {"ckpt"}
    engine.close()


def test_an_export_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_for(model_of("gpt-tiny"))

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(CheckpointError, match=r"there is no room for .*one\.safetensors"):
        hf.export(engine, tmp_path / "one.safetensors")
    monkeypatch.undo()
    assert not list(tmp_path.iterdir())
    assert hf.export(engine, tmp_path / "one.safetensors") == ["one.safetensors"]
    with safe_open(tmp_path / "one.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    engine.close()


PEAK = """
import resource, sys, threading, time, torch
from pathlib import Path
import scrimp
from scrimp.ext import hf
from tests.ext.hf.test_exports import resident, wide_model

width, kind, folder = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
engine = scrimp.Engine(wide_model(width), memory="2GiB", optimizer=scrimp.SGD(lr=0.1, momentum=0), device="cpu")
hf.export(engine, folder / "warm.safetensors")
source = engine
if kind == "checkpoint":
    engine.save(folder / "ckpt")
    engine.close()
    source = folder / "ckpt"
over, most, begin = threading.Event(), [0], resident()
def watch():
    while not over.is_set():
        most[0] = max(most[0], resident())
        time.sleep(0.001)
thread = threading.Thread(target=watch)
thread.start()
hf.export(source, folder / "all.safetensors", dtype="fp32")
over.set()
thread.join()
print(most[0] - begin, sum(p.numel() for p in engine._run.model.parameters()))
"""


def resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def wide_model(width: int) -> torch.nn.Module:
    """One embedding has a third of all parameters."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = torch.nn.Embedding(16 * width, 256)
            self.layers = torch.nn.ModuleList(torch.nn.Linear(256, 2 * width) for _ in range(16))

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return sum(layer(self.embedding(tokens)).sum() for layer in self.layers)  # type: ignore[return-value]

    return Model()


FULL = pytest.mark.full


@pytest.mark.parametrize(
    ("kind", "width"),
    [
        ("engine", 2048),
        pytest.param("engine", 4096, marks=FULL),
        pytest.param("checkpoint", 2048, marks=FULL),
        pytest.param("checkpoint", 4096, marks=FULL),
    ],
)
def test_memory_does_not_grow_with_the_model(kind: str, width: int, tmp_path: Path) -> None:
    """A part of 4 million elements in fp32, what it is made of, and what is written: 48 MiB, and the allocator's rest.
    The model takes 104 or 208 MB, and its embedding a third of that."""
    done = subprocess.run(
        [sys.executable, "-c", PEAK, str(width), kind, str(tmp_path)], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    more, numel = map(int, done.stdout.split())
    assert numel > 12_000 * width
    assert more < 64 << 20, f"{more} more bytes for {numel} parameters"
