"""`scrimp train`: a configuration becomes a run, with preflight, data, plan, checkpoints, metrics and a report.

In:   a TOML file and --set; files of data; the ranks that torchrun started.
Out:  a run folder: config.toml, metrics.jsonl, plan.json, checkpoints/step-N, report.html; an `Outcome`.

    config.toml ──read──> Resolved ──preflight──> plan ──> Engine ──> steps ──> run folder
                          (values and origins)              │
                                  files ──> Samples ──> Order ──> batches

Read in this order:

    run.py        `train`: the whole of it in one screen
    config/       sections as frozen dataclasses, reading of TOML and --set, writing with origins
    model/        models named by the user: zoo, Hugging Face folder, module:function
    data/         text, tokens, datasets; the order of samples; this rank's part of a batch
    optimizer.py, schedule.py    optimizer and exchange as data; the learning rate as a function of the step
    devices.py, planning.py      the cluster; a plan by the planner, on rank 0, or of a file
    preflight/    what a run needs of the machine, before weights are loaded
    folder.py     the run folder: new, or to resume
    loop.py       steps, validation, checkpoints
    dry.py        `--dry-run`: plan and rehearsal on meta
    ranks.py, stop.py                what ranks agree on between steps; signals
    flops.py      FLOPs of a step, for the MFU
    set_pairs.py  --set name=value
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from scrimp._lazy import lazily

if TYPE_CHECKING:
    from scrimp.train.config.keys import Key, keys_of
    from scrimp.train.config.read import read_config
    from scrimp.train.config.resolved import Resolved
    from scrimp.train.config.sections import SECTIONS
    from scrimp.train.config.text import literal, to_toml
    from scrimp.train.devices import cluster_of
    from scrimp.train.folder import AUTO, NEW, RESUME, config_of, is_run
    from scrimp.train.model.build import model_and_batch
    from scrimp.train.model.importable import importable
    from scrimp.train.model.names import FOLDER, FUNCTION, check_model, kind_of
    from scrimp.train.run import Outcome, train
    from scrimp.train.set_pairs import pairs

__all__ = [
    "AUTO", "FOLDER", "FUNCTION", "NEW", "RESUME", "SECTIONS", "Key", "Outcome", "Resolved", "check_model", "cluster_of",
    "config_of", "importable", "is_run", "keys_of", "kind_of", "literal", "model_and_batch", "pairs", "read_config", "to_toml",
    "train",
]  # fmt: skip

__getattr__ = lazily(
    __name__,
    {
        "Key": "scrimp.train.config.keys",
        "keys_of": "scrimp.train.config.keys",
        "read_config": "scrimp.train.config.read",
        "Resolved": "scrimp.train.config.resolved",
        "SECTIONS": "scrimp.train.config.sections",
        "literal": "scrimp.train.config.text",
        "to_toml": "scrimp.train.config.text",
        "cluster_of": "scrimp.train.devices",
        "AUTO": "scrimp.train.folder",
        "NEW": "scrimp.train.folder",
        "RESUME": "scrimp.train.folder",
        "config_of": "scrimp.train.folder",
        "is_run": "scrimp.train.folder",
        "model_and_batch": "scrimp.train.model.build",
        "importable": "scrimp.train.model.importable",
        "FOLDER": "scrimp.train.model.names",
        "FUNCTION": "scrimp.train.model.names",
        "check_model": "scrimp.train.model.names",
        "kind_of": "scrimp.train.model.names",
        "pairs": "scrimp.train.set_pairs",
        "Outcome": "scrimp.train.run",
        "train": "scrimp.train.run",
    },
)
