"""The plans of all cases: the planner's own, and the baselines."""

from __future__ import annotations

import warnings
from functools import cache

from scrimp import Mesh, Plan, plan
from scrimp.planner.baselines.compare import BASELINES as NAMED
from scrimp.planner.baselines.compare import baseline_plan
from tests.lower.test_ranks import OWN
from tests.run import models

BASELINES = tuple(NAMED)
MICRO_BATCHES = 4  # of plans with pipeline stages


@cache
def plan_of(model: str, mesh: str, way: str, optimizer: str = "adamw", stages: int = 1, interleave: int = 1) -> Plan:
    """Raises `PlanError` if there is none."""
    args, kwargs = models.batch(model)
    built, batch, cluster = models.build(model), kwargs or args, f"{stages * Mesh.parse(mesh).size}xCPU"
    if way not in OWN:
        return baseline_plan(built, batch, cluster, way, mesh=mesh, optimizer=optimizer, precision="fp32", seconds=3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a gap that the time did not suffice for
        settings = {"mesh": mesh, "optimizer": optimizer, "precision": "fp32", "time_limit": 2, "gap": 0.05}
        if stages > 1:
            settings |= {"stages": stages, "micro_batches": MICRO_BATCHES, "interleave": interleave}
        return plan(built, batch, cluster, **settings, **OWN[way])
