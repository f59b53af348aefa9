"""Hugging Face models, as they come: the numbers of plain PyTorch, built on meta, read from their own folders."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from scrimp.chunks.tables.optimizers import AdamW
from scrimp.engine import Engine, Memory
from scrimp.errors import RunError
from scrimp.ext.ranks import pool
from tests.engine.test_engine import everything
from tests.rank_jobs import hf as jobs
from tests.support.reference import train_bf16, train_fp32

pytest.importorskip("transformers", reason="transformers is not installed (it is in the dev extra)")

STEPS = 20
LR = 3e-3
MODELS = ["gpt2", "llama"]


@cache
def model_of(name: str) -> nn.Module:
    torch.manual_seed(0)
    return jobs.build(name)


def on_meta(name: str, **overrides: Any) -> nn.Module:
    with torch.device("meta"):
        return jobs.build(name, **overrides)


def adamw(parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=LR, fused=True)


@cache
def reference(name: str, precision: str) -> tuple[dict[str, torch.Tensor], list[float]]:
    loop = train_fp32 if precision == "fp32" else train_bf16
    state, losses = loop(jobs.ByPosition(model_of(name)), jobs.batches(STEPS), adamw, loss_of=lambda out: out.loss)
    return {key.removeprefix("model."): value for key, value in state.items()}, losses


def engine_for(model: nn.Module, device: str | int = "1GiB", **kwargs: Any) -> Engine:
    return Engine(model, optimizer=AdamW(lr=LR), memory=Memory(device=device), device="cpu", **kwargs)


def run(engine: Engine, steps: int = STEPS) -> list[float]:
    return [float(engine.step(input_ids=tokens, labels=labels)) for tokens, labels in jobs.batches(steps)]


def assert_same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert {*want} <= {*got}
    wrong = [name for name in want if not torch.equal(got[name].float(), want[name].float())]
    assert not wrong, f"{len(wrong)} of {len(want)} differ: {wrong[:5]}"


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", MODELS)
def test_bit_equal_to_plain_pytorch(name: str, precision: str) -> None:
    """Where all fits, and at the least budget that a first step showed."""
    want, losses = reference(name, precision)
    loose = engine_for(copy.deepcopy(model_of(name)), precision=precision, activations="keep")
    assert run(loose) == losses
    assert losses[-1] < losses[0]
    assert_same(loose.state_dict(), want)
    probe = engine_for(copy.deepcopy(model_of(name)), precision=precision, activations="recompute,offload")
    run(probe, steps=1)
    least = probe.ledger.peak_nbytes
    tight = engine_for(
        copy.deepcopy(model_of(name)), least, precision=precision, activations="recompute,offload", chunk_numel=1000
    )
    run(tight)
    assert_same(tight.state_dict(), want)
    assert tight.ledger.peak_nbytes <= least < loose.ledger.peak_nbytes


@pytest.mark.parametrize("name", MODELS)
def test_two_ranks_equal_pytorchs_data_parallel(name: str) -> None:
    """Every step is the one that PyTorch's data parallel makes of the same weights, up to roundings that are counted."""
    (first, *_, errors), (second, *_) = pool(2).run(jobs.alongside, name, 4, "recompute,offload", timeout_seconds=300)
    assert not {key: times for key, times in errors.items() if not times <= 1}, "errors, as multiples of their bounds"
    assert all(torch.equal(second[key], value) for key, value in first.items())


@pytest.mark.parametrize("name", MODELS)
def test_a_cache_of_keys_is_not_filled_in_training(name: str) -> None:
    """Eager attention breaks if a recomputation appends to a cache; the model's own setting comes back."""
    model = jobs.build(name, attn_implementation="eager")
    assert model.config.use_cache
    engine = engine_for(model, activations="recompute,offload")
    run(engine, steps=2)
    assert model.config.use_cache
    assert engine.evaluate(input_ids=jobs.batches(1)[0][0]).past_key_values is not None


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("name", [*MODELS, "bert"])
def test_on_meta_with_the_weights_of_its_folder(name: str, sharded: bool, tmp_path: Path) -> None:
    model = model_of(name)
    model.save_pretrained(tmp_path, max_shard_size="20KB" if sharded else "1GB")
    assert (tmp_path / "model.safetensors.index.json").exists() == sharded
    engine = engine_for(on_meta(name), weights=tmp_path)
    assert_same(everything(engine), {**model.state_dict(), **dict(model.named_buffers())})
    assert run(engine, steps=2) == run(engine_for(copy.deepcopy(model)), steps=2)


@pytest.mark.parametrize("name", MODELS)
def test_on_meta_without_weights_is_drawn_as_the_model_draws(name: str) -> None:
    plain = on_meta(name).to_empty(device="cpu")
    torch.manual_seed(3)
    plain.initialize_weights()
    torch.manual_seed(3)
    engine = engine_for(on_meta(name))
    want = {**dict(plain.named_parameters()), **dict(plain.named_buffers())}
    tied = {"transformer.wte.weight", "lm_head.weight"} if name == "gpt2" else set()  # drawn twice there, once here
    got = everything(engine)
    assert_same(got, {key: value for key, value in want.items() if key not in tied})
    for key in tied:
        assert float(got[key].std()) == pytest.approx(0.02, rel=0.1)
    losses = run(engine)
    assert losses[-1] < losses[0]


def test_a_block_alone_is_scaled_by_the_module_above_it() -> None:
    """Without a repeat the parts of a block are layers; GPT-2 draws `c_proj` anew in the module that holds it."""
    engine = engine_for(on_meta("gpt2", n_layer=1, n_embd=64, initializer_range=1.0))
    assert "transformer.h.0.mlp.c_proj" in {layer.path for layer in engine._run.store.table.layers}
    state = everything(engine)
    assert float(state["transformer.h.0.mlp.c_proj.weight"].std()) == pytest.approx(2**-0.5, rel=0.05)
    assert float(state["transformer.h.0.mlp.c_fc.weight"].std()) == pytest.approx(1.0, rel=0.05)


@pytest.mark.parametrize(("stored", "wanted"), [("gpt2-base", "gpt2"), ("gpt2", "gpt2-base"), ("llama", "llama-base")])
def test_base_model_and_model_with_a_head(stored: str, wanted: str, tmp_path: Path) -> None:
    model = model_of(stored)
    model.save_pretrained(tmp_path)
    got = engine_for(on_meta(wanted), weights=tmp_path).state_dict()
    base = {key.split(".", 1)[1] if key.startswith(("transformer.", "model.")) else key: v for key, v in got.items()}
    inner = getattr(model, model.base_model_prefix, model)
    assert_same(base, inner.state_dict())


def test_a_head_that_the_base_model_does_not_have_is_named(tmp_path: Path) -> None:
    model_of("llama-base").save_pretrained(tmp_path)
    with pytest.raises(RunError, match=r"LlamaForCausalLM: 1 missing \(lm_head\.weight\); none unexpected"):
        engine_for(on_meta("llama"), weights=tmp_path)


def test_what_old_versions_stored_is_left_lying() -> None:
    for name, extra in (("gpt2", "transformer.h.0.attn.bias"), ("llama", "model.layers.0.self_attn.rotary_emb.inv_freq")):
        state = {**model_of(name).state_dict(), extra: torch.zeros(4)}
        assert_same(engine_for(on_meta(name), weights=state).state_dict(), model_of(name).state_dict())
