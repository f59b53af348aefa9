"""What a run folder holds of an engine: settings, layers and ledgers, a recorded step, the bound, the machine."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from typing import TYPE_CHECKING, Any

import torch

from scrimp._version import __version__
from scrimp.chunks import DEVICE, DISK, HOST, STREAMED, Store
from scrimp.engine.gradients.sparse import SparseExchange
from scrimp.engine.observe.bound import Bound
from scrimp.engine.observe.predicted import predicted_step
from scrimp.engine.setup.budget import available_host_nbytes
from scrimp.ledger import Ledger

if TYPE_CHECKING:
    from scrimp.engine._training import Training

PACKAGES = ("numpy", "safetensors", "highspy", "triton", "transformers")


def run_data(engine: Training, began: str, ended: str | None) -> dict[str, Any]:
    weights = {id(weight): weight for weight in engine.weights.values()}
    ledgers = {"device": engine.ledger.device, "host": engine.ledger.host, "disk": engine.ledger.disk}
    return {
        "scrimp": __version__,
        "began": began,
        "ended": ended,
        "model": type(engine.model).__name__,
        "parameters": [*engine.weights],
        "numel": sum(weight.numel() for weight in weights.values()),
        "steps": engine.steps,
        "skipped": engine.skipped,
        "settings": _settings(engine),
        "layers": [_layer(engine.store, k) for k in range(len(engine.store.table.layers))],
        "ledgers": {tier: _ledger(ledger) for tier, ledger in ledgers.items()},
    }


def trace_data(engine: Training) -> dict[str, Any] | None:
    """The last recorded step, and what its schedule predicted; None before the first one."""
    recorded = engine.metering.recorded
    if recorded is None or not recorded.points:
        return None
    return {"measured": recorded.to_data(), "predicted": predicted_step(engine, recorded)}


def bound_data(bound: Bound) -> dict[str, Any]:
    names = ("up_nbytes", "down_nbytes", "least_up_nbytes", "least_down_nbytes", "seconds", "busy_seconds", "waited_seconds")
    return {
        **{name: getattr(bound, name) for name in names},
        "least_seconds": bound.least_seconds,
        "physical_seconds": bound.physical_seconds,
        "terms": bound.terms,
        "gap": bound.gap,
        "machine": bound.machine.to_data(),
    }


def machine_data(device: torch.device) -> dict[str, Any]:
    cuda = device.type == "cuda"
    return {
        "platform": platform.platform(),
        "processor": platform.machine(),
        "cores": os.cpu_count() or 1,
        "threads": torch.get_num_threads(),
        "host_memory_available_nbytes": available_host_nbytes(),
        "device": torch.cuda.get_device_name(device) if cuda else "cpu",
        **({"device_memory_nbytes": torch.cuda.get_device_properties(device).total_memory} if cuda else {}),
        "versions": {
            "python": platform.python_version(),
            "scrimp": __version__,
            "torch": torch.__version__,
            **({"CUDA": torch.version.cuda} if torch.version.cuda else {}),
            **_installed(),
        },
    }


def _installed() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _settings(engine: Training) -> dict[str, Any]:
    budget = engine.budget
    return {
        "precision": engine.precision,
        "optimizer": type(engine.optimizer.settings).__name__,
        "activations": ", ".join(engine.planning.ways),
        "micro_batches": engine.micro_batches,
        "exchange": _exchange(engine),
        "clip_norm": engine.clip_norm,
        "ranks": engine.wire.world,
        "rank": engine.wire.rank,
        "device": str(engine.device),
        "device_nbytes": budget.device_nbytes,
        "host_nbytes": budget.host_nbytes,
        "disk": None if budget.disk is None else str(budget.disk),
    }


def _exchange(engine: Training) -> str:
    exchange = engine.exchanging
    return f"sparse, density {exchange.settings.density:g}" if isinstance(exchange, SparseExchange) else "dense"


def _layer(store: Store, layer: int) -> dict[str, Any]:
    """Bytes at rest on each tier of this rank."""
    weights, gradients, rest = store.placement_nbytes(layer)
    tier, nbytes = store.placements[layer].tier, store.nbytes(layer)
    device, host, disk = {
        DEVICE: (store.device_placement_nbytes(layer) + (nbytes if store.anchored(layer) else 0), 0, 0),
        STREAMED: (nbytes, rest, 0),
        HOST: (0, weights + gradients + rest, 0),
        DISK: (0, weights + gradients, rest),
    }[tier]
    return {
        "path": store.table.layers[layer].path,
        "tier": str(tier),
        "nbytes": nbytes,
        "device_nbytes": device,
        "host_nbytes": host,
        "disk_nbytes": disk,
    }


def _ledger(ledger: Ledger) -> dict[str, Any]:
    return {
        "now": dict(ledger.now),
        "peak_nbytes": ledger.peak_nbytes,
        "peak": {"when": ledger.peak.when, "by_kind": dict(ledger.peak.by_kind)},
    }
