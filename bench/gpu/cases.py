"""The points that are measured: ordinary models, the weights that every contender begins with, the batch.

The models are the zoo's GPT and Llama and the Llama of transformers, all with an untied head; none was written for this.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import nn

import scrimp
from scrimp import zoo

CHUNK = 2048  # tokens whose logits are held at once, in the zoo's models


# What rows of results call "recompute", in the engine's words.
ACTIVATIONS = {"all": "recompute,offload", "none": "keep", "auto": "auto"}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One point: the model, the batch, the cap on the GPU, the steps that are taken.

    The unclipped steps come first and the clipped ones after them, for all contenders alike: so losses can be compared step
    by step. `host`: what scrimp may use of the host; the others take what they need.
    """

    model: str = "gpt"
    layers: int
    dim: int
    batch: int
    seq: int = 1024
    vocab: int = 50304
    cap: str = "24GiB"
    host: str = "auto"
    recompute: str = "all"
    states: str = "fp32"
    warm_up: int = 3
    steps: int = 5
    clipped: bool = True
    device: str = "cuda"

    @property
    def lr(self) -> float:
        """The wider the model, the more an update of every weight moves its output: falling losses, and no leaps."""
        return 1e-2 / self.dim

    def modes(self) -> list[tuple[str, float | None, int]]:
        """Name, clipping, steps before the timed ones."""
        return [("unclipped", None, self.warm_up)] + ([("clipped", 1.0, 2)] if self.clipped else [])

    def build(self) -> nn.Module:
        """On torch's default device, which had better be meta."""
        heads = max(1, self.dim // 128)
        if self.model == "hf-llama":
            return _hf_llama(self, heads)
        shape: dict[str, Any] = {"dim": self.dim, "heads": heads, "layers": self.layers, "vocab": self.vocab, "seq": self.seq}
        shape["head_loss"] = partial(scrimp.chunked_cross_entropy, chunk=CHUNK)
        if self.model == "llama":
            return zoo.build("llama-tiny", **shape, kv_heads=heads, hidden=_hidden(self.dim))
        return zoo.build("gpt-tiny", **shape, tie=False)

    def on_meta(self) -> nn.Module:
        with torch.device("meta"):
            return self.build()

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        return [*(model.model.layers if self.model == "hf-llama" else model.blocks)]  # type: ignore[union-attr,arg-type]

    def parameters(self) -> int:
        return _count(self)

    def filled(self, device: str, dtype: torch.dtype = torch.float32) -> nn.Module:
        """The whole model with its first weights."""
        model = self.on_meta()
        First(model, self.device).fill(model, device, dtype)
        self.fill_buffers(model)
        return model

    def fill_buffers(self, model: nn.Module) -> None:
        """Tables such as rotary angles, from a model of one layer: they are the same in any depth."""
        tables = dict(replace(self, layers=1).build().named_buffers()) if any(True for _ in model.buffers()) else {}
        for path, module in model.named_modules():
            for name in module._buffers:
                module._buffers[name] = tables[f"{path}.{name}" if path else name].to(self.device)

    def batch_of(self) -> dict[str, torch.Tensor]:
        """The same at every step: what is compared is the curve, not what is learnt."""
        tokens, targets = zoo.example_batch("gpt-tiny", batch=self.batch, step=0, seq=self.seq, vocab=self.vocab)
        if self.model == "hf-llama":
            return {"input_ids": tokens, "labels": tokens}
        return {"tokens": tokens, "targets": targets}


class First(Mapping[str, torch.Tensor]):
    """The weights that all contenders begin with, drawn by name, one at a time, where that is quick."""

    def __init__(self, model: nn.Module, device: str) -> None:
        self._shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._device = device

    def __getitem__(self, name: str) -> torch.Tensor:
        shape = self._shapes[name]
        if len(shape) == 1:
            return (torch.zeros if name.endswith("bias") else torch.ones)(shape, device=self._device)
        draw = torch.Generator(self._device).manual_seed(zlib.crc32(name.encode()))
        return torch.randn(shape, generator=draw, device=self._device) * 0.02

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)

    def fill(self, part: nn.Module, device: str, dtype: torch.dtype = torch.float32) -> None:
        """Parameters of a part of the model that are still on meta."""
        for module in part.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and parameter.is_meta:
                    values = self[self._names[id(parameter)]].to(device, dtype)
                    module._parameters[name] = nn.Parameter(values)


@cache
def _count(case: Case) -> int:
    return sum(parameter.numel() for parameter in case.on_meta().parameters())


def _hidden(dim: int) -> int:
    """Of a gated MLP: 8/3 of the width, up to a multiple of 256."""
    return -(-dim * 8 // 3 // 256) * 256


def _hf_llama(case: Case, heads: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    settings = {"num_hidden_layers": case.layers, "num_attention_heads": heads, "num_key_value_heads": heads}
    widths = {"hidden_size": case.dim, "intermediate_size": _hidden(case.dim), "vocab_size": case.vocab}
    special = {"bos_token_id": 0, "eos_token_id": 0, "use_cache": False, "tie_word_embeddings": False}
    model: nn.Module = LlamaForCausalLM(LlamaConfig(**settings, **widths, **special, max_position_embeddings=case.seq))
    return model
