"""The training engine: one step at a time, layer by layer, within a memory budget.

In:   an `nn.Module`, an optimizer, a `Memory` budget; then one batch per step.
Out:  the loss; the model's parameters, updated as plain PyTorch would update them; a ledger of every byte.

    step:   admit ──> forward and backward ──> check ──────> update ──> learn
                        │            │           │             │          │
                    residency    exchange    grad_check     update/   schedule/
                     (step/)   (gradients/)

Ranks exchange a layer's gradients as soon as backward has made them, so the exchange overlaps with backward.

Read in this order:

    _engine.py    `Engine`: what users call
    _training.py  `Training`: all parts of an engine, and the step as a sequence of phases
    _eager_passes.py  forward and backward of the model itself; `lowered/passes.py` is the other way
    setup/        arguments, budget, first placement; the engine adopts the model's parameters
    sources/      weights in another library's format or under its names: DCP folders, names that transformers converts
    step/         one forward and backward: layers are fetched before use and evicted after it; a failed attempt is undone
    lowered/      under a plan: the plan's program runs in place of the model, and model data is sharded as the plan says
    gradients/    how a gradient leaves the model: dense (averaged) or sparse (top-k with error feedback)
    update/       the global gradient check, then the optimizer on device, host or disk, overlapped with the next step
    schedule/     a traced step becomes a schedule: placement of layers, kept activations, prefetch and eviction
    entry/        what users call between steps: evaluate, backward/update, full_parameters, save/load, learning rates, resize
    observe/      the lower bound of a step, the progress line, what a run folder holds of an engine, memory over the points of
                  a planned step
    chunked_loss.py  cross-entropy that never holds all logits

One fetch:     step/layer_forward.py -> step/residency.py -> chunks/store/store.py
Under a plan:  _training.py (`run_micro_batches`) -> lowered/passes.py -> lower/source.py -> lowered/weights.py
With stages:   _training.py (`run_micro_batches`) -> lowered/stages.py -> lower/pipeline.py -> lower/source.py
One gradient:  _training.py (`receive`) -> gradients/dense.py -> update/update.py -> chunks/update/update.py
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from scrimp._lazy import lazily
from scrimp.cluster import Machine, Operators, Reserve, register_measure

if TYPE_CHECKING:
    from scrimp.engine._engine import Engine
    from scrimp.engine.chunked_loss import chunked_cross_entropy
    from scrimp.engine.entry.parameter_parts import parameter_parts, parameter_sizes
    from scrimp.engine.lowered.lone_rank import LoneRank, stage_of
    from scrimp.engine.lowered.passes import MeteredRanks
    from scrimp.engine.observe.progress import Progress
    from scrimp.engine.observe.timeline import Points, Recorder, Timeline, recording
    from scrimp.engine.schedule.operator_probe import probe_operators
    from scrimp.engine.schedule.probe import probe
    from scrimp.engine.setup.budget import Memory, available_host_nbytes
    from scrimp.engine.setup.process_groups import meet_under_torchrun

__all__ = [
    "Engine", "LoneRank", "Memory", "MeteredRanks", "Points", "Progress", "Recorder", "Timeline", "available_host_nbytes",
    "chunked_cross_entropy", "meet_under_torchrun", "parameter_parts", "parameter_sizes", "probe", "probe_operators", "recording",
    "stage_of",
]  # fmt: skip

__getattr__ = lazily(
    __name__,
    {
        "Engine": "scrimp.engine._engine",
        "chunked_cross_entropy": "scrimp.engine.chunked_loss",
        "parameter_parts": "scrimp.engine.entry.parameter_parts",
        "parameter_sizes": "scrimp.engine.entry.parameter_parts",
        "LoneRank": "scrimp.engine.lowered.lone_rank",
        "stage_of": "scrimp.engine.lowered.lone_rank",
        "MeteredRanks": "scrimp.engine.lowered.passes",
        "Points": "scrimp.engine.observe.timeline",
        "Recorder": "scrimp.engine.observe.timeline",
        "Timeline": "scrimp.engine.observe.timeline",
        "recording": "scrimp.engine.observe.timeline",
        "Progress": "scrimp.engine.observe.progress",
        "probe": "scrimp.engine.schedule.probe",
        "probe_operators": "scrimp.engine.schedule.operator_probe",
        "Memory": "scrimp.engine.setup.budget",
        "available_host_nbytes": "scrimp.engine.setup.budget",
        "meet_under_torchrun": "scrimp.engine.setup.process_groups",
    },
)


def _probe(device: str | None, disk: str | Path | None) -> Machine:
    """Measures this machine; loaded when `Cluster.probe` is first called."""
    from scrimp.engine.schedule.probe import probe

    return probe(device, disk)


def _probe_operators(device: str | None) -> Operators:
    from scrimp.engine.schedule.operator_probe import probe_operators as measured

    return measured(device)


def _probe_reserve(device: str | None) -> Reserve | None:
    from scrimp.engine.schedule.reserve_probe import probe_reserve

    return probe_reserve(device)


register_measure(_probe, _probe_operators, _probe_reserve)
