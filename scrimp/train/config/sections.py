"""The sections of a configuration. docs/reference/config.md is written from this file. Torch is not loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from scrimp.train.config import keys
from scrimp.train.config.keys import INPUT, NAME, OUTPUT

AUTO, NONE, BYTES = "auto", "none", "bytes"
TOKEN_DTYPES = ("uint8", "uint16", "uint32", "int32", "int64")


@dataclass(frozen=True, kw_only=True)
class ModelSection:
    """The model, and its initial weights."""

    name: str = keys.text(
        None, "A model of the zoo, a folder with a Hugging Face config.json, or module:function.", path=NAME, required=True
    )
    weights: str | None = keys.text(
        None, "A Hugging Face folder or a .safetensors file. Without it weights are random, by train.seed.", path=INPUT
    )
    settings: Mapping[str, Any] = keys.table(
        "Settings of the model, such as layers = 4: those of the zoo, or of the config.json."
    )


@dataclass(frozen=True, kw_only=True)
class DataSection:
    """The training data: exactly one of text, tokens, dataset and function."""

    text: tuple[str, ...] = keys.texts("Text files, or patterns such as 'docs/**/*.md'.", path=INPUT)
    tokens: tuple[str, ...] = keys.texts(
        "Files of tokens: .npy, or .bin with data.dtype or a JSON file beside it. They are mapped, not read.", path=INPUT
    )
    dtype: str | None = keys.one_of(None, TOKEN_DTYPES, "Of .bin files without a JSON file.")
    dataset: str | None = keys.text(None, "A folder of Hugging Face datasets (save_to_disk).", path=INPUT)
    split: str | None = keys.text(None, "Of a dataset with several splits.")
    column: str | None = keys.text(None, "Of a dataset: its text, or its lists of tokens. Default: 'input_ids', else 'text'.")
    function: str | None = keys.text(
        None, "module:function, which returns a map-style dataset: len() and [k], a tuple or a dict of tensors."
    )
    seq: int | None = keys.whole(None, "Tokens of a sequence. Default: that of the zoo's model.")


@dataclass(frozen=True, kw_only=True)
class TokenizerSection:
    """What turns text into tokens."""

    name: str = keys.text(BYTES, "'bytes' (256 tokens, one for each byte), or a folder of a Hugging Face tokenizer.", path=NAME)


@dataclass(frozen=True, kw_only=True)
class TrainSection:
    """The training itself."""

    steps: int = keys.whole(1000, "Steps of the whole run.")
    batch: int = keys.whole(32, "Samples of a step, over all ranks.")
    micro_batches: int = keys.whole(1, "Parts of a rank's batch whose gradients are accumulated.")
    precision: str = keys.one_of("bf16", ("bf16", "fp16", "fp32"), "Of the weights on the device. Master weights are fp32.")
    clip_norm: float | None = keys.number(None, "The largest norm of the global gradient. Not set: no clipping.", above=0)
    activations: str = keys.text(AUTO, "'auto', or some of keep, recompute, offload, joined by commas.")
    seed: int = keys.whole(0, "Of initial weights, data order and dropout.", least=0)
    device: str | None = keys.text(None, "cuda, cuda:1 or cpu. Default: this rank's GPU if there is one.")


@dataclass(frozen=True, kw_only=True)
class MemorySection:
    """Budgets, as in scrimp.Memory."""

    device: int | str = keys.size(AUTO, "Of one rank. 'auto': 90 % of the free GPU memory, or 25 % of the RAM without a GPU.")
    host: int | str = keys.size(AUTO, "Of one node. 'auto': 80 % of the available RAM.")
    disk: str | None = keys.text(
        None, "A folder for master weights and optimizer states that the host has no room for.", path=OUTPUT
    )


@dataclass(frozen=True, kw_only=True)
class ClusterSection:
    """The devices, and the plan that shards the model over them."""

    name: str = keys.text(AUTO, "A preset such as '8xH100', a cluster file, or 'auto': the ranks that run.", path=NAME)
    plan: str = keys.text(
        NONE, "'none' (ranks shard model data evenly), 'auto' (the planner runs first), or a plan file.", path=NAME
    )
    mesh: str | None = keys.text(None, "Of plan = 'auto': axes and sizes, such as 'dp=2,tp=4'. Not set: searched.")
    objective: str = keys.one_of("memory", ("memory", "time", "redundancy"), "Of plan = 'auto': what to minimise.")
    stages: int = keys.whole(1, "Of plan = 'auto': pipeline stages.")
    reserve: str | None = keys.text(None, "Of plan = 'auto': 'auto', or a size that stays free for the rest of the device.")
    time_limit: float = keys.number(60.0, "Of plan = 'auto': seconds of the search.", least=1, most=86400)


@dataclass(frozen=True, kw_only=True)
class ExchangeSection:
    """How gradients travel between ranks."""

    kind: str = keys.one_of("dense", ("dense", "sparse"), "'sparse': top-k gradients with error feedback.")
    density: float = keys.number(0.01, "Of sparse: the share of entries that a rank sends.", above=0, most=1)
    warm_up: int = keys.whole(0, "Of sparse: steps over which the density falls to its value.", least=0)
    values: str = keys.one_of("bf16", ("bf16", "fp16", "fp32"), "Of sparse: format of the values sent.")
    residual: str = keys.one_of("fp32", ("fp32", "bf16", "int8", AUTO), "Of sparse: format of the residual.")
    mesh: str | None = keys.text(
        None, "Of sparse, without a plan: 'node=2,gpu=8' exchanges between nodes and shards inside them."
    )
    axis: str | None = keys.text(None, "Of sparse, with a plan: the mesh axis whose ranks exchange.")


@dataclass(frozen=True, kw_only=True)
class OptimizerSection:
    """The optimizer. Keys that are not set have the defaults of scrimp.AdamW or scrimp.SGD."""

    name: str = keys.one_of("adamw", ("adamw", "sgd"), "AdamW with decoupled weight decay, or SGD.")
    lr: float = keys.number(3e-4, "The learning rate, which the schedule multiplies.")
    weight_decay: float | None = keys.number(None, "Default: 0.01 of AdamW, 0 of SGD.")
    betas: tuple[float, float] | None = keys.pair(None, "Of AdamW. Default: [0.9, 0.999].")
    eps: float | None = keys.number(None, "Of AdamW. Default: 1e-8.")
    state: str | None = keys.one_of(None, ("fp32", "int8"), "Of AdamW: format of its states. 'int8' changes numerical results.")
    momentum: float | None = keys.number(None, "Of SGD. Default: 0.", most=1)
    dampening: float | None = keys.number(None, "Of SGD. Default: 0.", most=1)
    nesterov: bool = keys.flag(False, "Of SGD.")
    groups: tuple[Mapping[str, Any], ...] = keys.tables(
        "[[optimizer.groups]]: params, a pattern such as '*.bias', and other values for those."
    )


@dataclass(frozen=True, kw_only=True)
class ScheduleSection:
    """The learning rate over the steps."""

    kind: str = keys.function_or(
        "constant",
        ("constant", "linear", "cosine"),
        "After the warm-up. A function gets the step, from 0, and returns the factor of the learning rate.",
    )
    warm_up: int = keys.whole(0, "Steps over which the rate rises.", least=0)
    final: float = keys.number(0.0, "Of linear and cosine: the factor at the last step.", most=1)


@dataclass(frozen=True, kw_only=True)
class ValidationSection:
    """The loss on samples that training does not see."""

    every: int = keys.whole(0, "Steps between validations. 0: none, and nothing is held out.", least=0)
    share: float = keys.number(0.05, "Of the samples, the last of the data, that are held out.", above=0, most=0.5)
    batches: int = keys.whole(8, "Batches of a validation, of train.batch samples each.")


@dataclass(frozen=True, kw_only=True)
class CheckpointSection:
    """Checkpoints. There is one at the end, and one when SIGTERM or Ctrl-C stops the run, whatever these say."""

    every: int = keys.whole(500, "Steps between checkpoints. 0: only at the end.", least=0)
    keep: int = keys.whole(2, "The newest that are kept.")
    background: bool = keys.flag(
        False,
        "Write while training goes on, but for the last one. Takes host memory for copies, as far as memory.host leaves some.",
    )


@dataclass(frozen=True, kw_only=True)
class MetricsSection:
    """What a run writes while it trains. metrics.jsonl is always written."""

    every: int | None = keys.whole(
        None, "Steps between lines where the output is no terminal. Default: ten lines a run, or one in 10 s."
    )
    tensorboard: bool = keys.flag(False, "Also write TensorBoard events, at each checkpoint and at the end.")
    report: bool = keys.flag(True, "Write report.html at the end.")


@dataclass(frozen=True, kw_only=True)
class RunSection:
    """The run folder."""

    folder: str = keys.text("run", "Everything that a run writes goes here.", path=OUTPUT)


@dataclass(frozen=True, kw_only=True)
class Config:
    """All sections."""

    model: ModelSection
    data: DataSection = field(default_factory=DataSection)
    tokenizer: TokenizerSection = field(default_factory=TokenizerSection)
    train: TrainSection = field(default_factory=TrainSection)
    memory: MemorySection = field(default_factory=MemorySection)
    cluster: ClusterSection = field(default_factory=ClusterSection)
    exchange: ExchangeSection = field(default_factory=ExchangeSection)
    optimizer: OptimizerSection = field(default_factory=OptimizerSection)
    schedule: ScheduleSection = field(default_factory=ScheduleSection)
    validation: ValidationSection = field(default_factory=ValidationSection)
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)
    metrics: MetricsSection = field(default_factory=MetricsSection)
    run: RunSection = field(default_factory=RunSection)


SECTIONS: dict[str, type] = {
    "model": ModelSection, "data": DataSection, "tokenizer": TokenizerSection, "train": TrainSection, "memory": MemorySection,
    "cluster": ClusterSection, "exchange": ExchangeSection, "optimizer": OptimizerSection, "schedule": ScheduleSection,
    "validation": ValidationSection, "checkpoint": CheckpointSection, "metrics": MetricsSection, "run": RunSection,
}  # fmt: skip
