"""An engine's start under a plan: who captures."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import scrimp.planner
from scrimp import zoo
from tests.rank_jobs.planned_engine import OPTIMIZERS

KEPT = ("XDG_CACHE_HOME", "SCRIMP_GRAPHS")


def start(plan: str, name: str, rows: int, folder: str, *, switch: str = "1", stranger: int = -1, hooked: bool = False) -> Any:
    """How often this rank captured, and the loss of the first step. `stranger`: a rank whose model has one attribute more;
    `hooked`: models have a hook, and so no key."""
    before = {name: os.environ.get(name) for name in KEPT}
    os.environ.update(XDG_CACHE_HOME=folder, SCRIMP_GRAPHS=switch)
    try:
        found = scrimp.Plan.from_json(plan)
        torch.manual_seed(0)
        model = zoo.build(name)
        if dist.get_rank() == stranger:
            model.more = True  # type: ignore[assignment]
        if hooked:
            model.register_forward_pre_hook(lambda *_: None)
        with mock.patch.object(scrimp.planner, "captured_for", wraps=scrimp.planner.captured_for) as captured:
            optimizer = OPTIMIZERS[found.optimizer]()
            engine = scrimp.Engine(model, plan=found, optimizer=optimizer, precision=found.precision, device="cpu")
        loss = float(engine.step(*zoo.example_batch(name, rows)))
        engine.close()
        return captured.call_count, loss
    finally:
        for each, value in before.items():
            os.environ.pop(each, None)
            if value is not None:
                os.environ[each] = value
