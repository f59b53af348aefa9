"""What TrainingArguments mean for the engine, and which of them it cannot follow. Nothing here imports transformers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from scrimp._warnings import warn
from scrimp.errors import RunError

# Settings that would be ignored, or would change what the engine has adopted; each with what to do instead.
REFUSED = {
    "torch_compile": "the engine runs each layer's operators one by one and does not run compiled layers; leave it out",
    "deepspeed": "the engine shards model data itself; leave it out, and give memory='24GiB'",
    "fsdp": "the engine shards model data itself; leave it out, and start the same script with torchrun",
    "parallelism_config": "the engine shards model data itself; leave it out, or give plan=scrimp.plan(...)",
    "use_liger_kernel": "the trainer would patch layers that the engine adopted; patch the model before you make the trainer",
    "auto_find_batch_size": "the engine changes no batch size; leave it out: a FitError names the least budget for the batch",
    "activation_offloading": "the engine offloads activations itself; leave it out, and give activations='recompute,offload'",
}
FULL_EVAL = {"bf16_full_eval": "bf16", "fp16_full_eval": "fp16"}
DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}


def check_arguments(args: Any, precision: str) -> None:
    """Raises if TrainingArguments ask for what the engine cannot do."""
    for name, remedy in REFUSED.items():
        value = getattr(args, name, None)
        if value:
            raise RunError(f"TrainingArguments({name}={value!r}) is not possible within a memory budget: {remedy}")
    for name, wanted in FULL_EVAL.items():
        if getattr(args, name, False) and precision != wanted:
            raise RunError(
                f"TrainingArguments({name}=True) converts the model to {wanted} for evaluation, and the engine's weights are "
                f"{precision}: leave it out, or give precision={wanted!r}"
            )


def precision_of(args: Any, given: str | None) -> str:
    """Of the weights on the device: as given, else bf16 or fp16 if the arguments say so, else fp32."""
    if given is not None:
        return given
    return "bf16" if args.bf16 else "fp16" if args.fp16 else "fp32"


def warn_of_dtype(model: nn.Module, precision: str, given: str | None) -> None:
    """Warns if the model was loaded in fewer bits than the engine trains with, and nobody asked for that."""
    found = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()} & DTYPES.keys()
    if found and given is None and precision == "fp32":
        dtype = sorted(found, key=str)[0]
        warn(
            f"the model's weights are {dtype}, and TrainingArguments has neither bf16 nor fp16: the engine trains with fp32 "
            f"weights, which take twice the memory on the device; give precision={DTYPES[dtype]!r} for such weights and "
            "fp32 masters"
        )


def activations_of(args: Any, given: str | Iterable[str] | None) -> str | Iterable[str]:
    """As given; else what `gradient_checkpointing` asks for; else "auto"."""
    if given is not None:
        return given
    if not args.gradient_checkpointing:
        return "auto"
    wanted = dict(args.gradient_checkpointing_kwargs or {})
    if wanted.get("every_n_layers", 1) != 1:
        warn(
            f"gradient_checkpointing_kwargs={{'every_n_layers': {wanted['every_n_layers']}}}: the engine recomputes every layer; "
            "give activations='auto', and it recomputes as many as the budget requires"
        )
    return "recompute,offload" if wanted.get("offload") else "recompute"
