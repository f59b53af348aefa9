"""Fine-tune a Hugging Face model within a memory budget that is smaller than its model data.

    python examples/hf_trainer.py                      # within 6 MiB
    python examples/hf_trainer.py --memory 64MiB       # with more room it is faster; losses are the same
    python examples/hf_trainer.py --plain              # transformers' own Trainer, for comparison

The model is tiny and made here, so nothing is downloaded. Put a folder of your own model in its place.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from scrimp.ext.hf import Trainer

VOCABULARY, LENGTH = 128, 48


def make_model(folder: Path) -> None:
    """A folder as `hf download` makes it: config.json and safetensors."""
    transformers.set_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=96, intermediate_size=256, num_hidden_layers=8, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=LENGTH, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)


def make_data(count: int, seed: int) -> list[dict[str, list[int]]]:
    """Sequences that count upwards in steps of 2."""
    draw = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(count):
        start = int(torch.randint(VOCABULARY, (), generator=draw))
        ids = [(start + 2 * k) % VOCABULARY for k in range(LENGTH)]
        rows.append({"input_ids": ids, "labels": ids})
    return rows


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--memory", default="6MiB", help="bytes of the device for everything, such as 6MiB")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--plain", action="store_true", help="use transformers' own Trainer")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder) / "model")
        settings = TrainingArguments(
            output_dir=f"{folder}/run", max_steps=given.steps, per_device_train_batch_size=4, learning_rate=3e-3,
            logging_steps=10, warmup_steps=5, lr_scheduler_type="cosine", eval_strategy="steps", eval_steps=given.steps,
            save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=not torch.cuda.is_available(),
            dataloader_pin_memory=False,
        )  # fmt: skip
        model = LlamaForCausalLM.from_pretrained(f"{folder}/model")
        data: dict[str, Any] = {"train_dataset": make_data(256, seed=1), "eval_dataset": make_data(32, seed=2)}
        if given.plain:
            transformers.Trainer(model, settings, **data).train()
            return []
        trainer = Trainer(model, settings, **data, memory=given.memory)
        trainer.train()
        needs = 16 * sum(parameter.numel() for parameter in trainer.model.parameters())
        peak = trainer.engine.ledger.peak_nbytes
        print(f"model data of plain PyTorch: {needs / 2**20:.1f} MiB; peak here: {peak / 2**20:.1f} MiB")
        print(f"peak by kind: {trainer.engine.ledger.peak}")
        prompt = torch.tensor([[10, 12, 14, 16]], device=trainer.model.device)
        print("after 10, 12, 14, 16:", trainer.model.generate(prompt, max_new_tokens=6, pad_token_id=0)[0, 4:].tolist())
        logs: list[dict[str, Any]] = trainer.state.log_history
        trainer.end()
    return logs


if __name__ == "__main__":
    main()
