"""`weights=` of Hugging Face folders whose names are not the model's: as `from_pretrained` loads them, by the same table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from scrimp.engine import Engine
from scrimp.errors import RunError

transformers = pytest.importorskip("transformers", reason="transformers is not installed (it is in the dev extra)")
pytest.importorskip("transformers.conversion_mapping", reason="this transformers converts no names")

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2,
}  # fmt: skip


def build(kind: str) -> Any:
    if kind == "mixtral":
        config = transformers.MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2)
        return transformers.MixtralForCausalLM(config)
    if kind == "qwen2_moe":
        more = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
        return transformers.Qwen2MoeForCausalLM(transformers.Qwen2MoeConfig(**SIZES, **more))
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))


def saved(kind: str, folder: Path) -> Any:
    torch.manual_seed(0)
    model = build(kind)
    model.save_pretrained(folder)
    return model


def loaded(kind: str, folder: Path) -> dict[str, torch.Tensor]:
    with torch.device("meta"):
        model = build(kind)
    engine = Engine(model, weights=folder, memory="1GiB", precision="fp32", device="cpu")
    state = engine.state_dict()
    engine.close()
    return state


@pytest.mark.parametrize("kind", ["mixtral", "qwen2_moe", "llama"])
def test_the_values_are_those_of_from_pretrained(kind: str, tmp_path: Path) -> None:
    want = saved(kind, tmp_path).state_dict()
    in_file = load_file(tmp_path / "model.safetensors").keys()
    assert (in_file != want.keys()) == (kind != "llama")
    found = loaded(kind, tmp_path)
    assert found.keys() == want.keys()
    assert all(torch.equal(found[name], want[name]) for name in want)


def test_over_several_files(tmp_path: Path) -> None:
    want = saved("mixtral", tmp_path).state_dict()
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    rows = {}
    for k, (name, tensor) in enumerate(sorted(tensors.items())):
        rows[name] = f"model-{k % 3}.safetensors"
        del tensor
    for file in sorted({*rows.values()}):
        save_file({name: tensors[name] for name in rows if rows[name] == file}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": rows}))
    found = loaded("mixtral", tmp_path)
    assert all(torch.equal(found[name], want[name]) for name in want)


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    saved("mixtral", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    gone = next(name for name in tensors if ".experts.2." in name)
    del tensors[gone]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(RunError, match=r"experts\.\S+ (cannot be made from|is \S+ in the model)|of another shape"):
        loaded("mixtral", tmp_path)


def test_the_names_that_this_uses_are_there() -> None:
    """Private: says when transformers changes them."""
    from transformers import conversion_mapping, core_model_loading

    assert callable(conversion_mapping.get_model_conversion_mapping)
    for name in ("WeightConverter", "WeightRenaming", "dot_natural_key", "rename_source_key"):
        assert hasattr(core_model_loading, name)
    converter = core_model_loading.WeightConverter(
        source_patterns=["a.*.w1", "a.*.w3"],
        target_patterns="a.w13",
        operations=[core_model_loading.MergeModulelist(dim=0), core_model_loading.Concatenate(dim=1)],
    )
    assert {"source_patterns"} <= set(dir(converter))
    for number in range(2):
        for key in ("w1", "w3"):
            converter.add_tensor("a.w13", f"a.{number}.{key}", f"a.*.{key}", lambda: torch.ones(3, 5))
    made = converter.convert("a.w13", model=None, config=None)
    assert {name: tuple(getattr(tensor, "shape", ())) for name, tensor in made.items()} == {"a.w13": (2, 6, 5)}
