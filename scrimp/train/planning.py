"""The plan of a run: none, of a file, or by the planner on rank 0, whose plan all ranks follow."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from scrimp.chunks import Optimizer
from scrimp.cluster import Cluster
from scrimp.errors import PlanError, PlanWarning, ScrimpError
from scrimp.planner import Plan, plan
from scrimp.train.config.sections import AUTO, NONE, Config
from scrimp.train.ranks import Ranks

Say = Callable[[str], None]


def plan_of(
    config: Config, model: nn.Module, batch: Any, cluster: Cluster | None, optimizer: Optimizer, ranks: Ranks,
    earlier: Path | None, say: Say,
) -> Plan | None:  # fmt: skip
    """`earlier`: the plan of a run that goes on, which is used again if it is for as many ranks."""
    wanted = config.cluster.plan
    if wanted == NONE:
        return None
    if wanted != AUTO:
        return loaded(Path(wanted))
    told: dict[str, str] = {}
    if ranks.first:
        assert cluster is not None  # it is known where the planner needs it
        try:
            told["plan"] = _earlier(earlier, ranks, say) or made(config, model, batch, cluster, optimizer, say).to_json()
        except ScrimpError as error:
            told["error"] = str(error)
    told = ranks.from_first(told)
    if "error" in told:
        raise PlanError(f"[cluster] plan = 'auto': {told['error']}")
    return Plan.from_json(told["plan"])


def made(config: Config, model: nn.Module, batch: Any, cluster: Cluster, optimizer: Optimizer, say: Say) -> Plan:
    section, train = config.cluster, config.train
    memory = None if config.memory.device == AUTO else config.memory.device
    counted: Optimizer | str = optimizer
    if not optimizer.states:
        counted = config.optimizer.name
        say("the planner counts one momentum per parameter, which this SGD does not have: the run takes less than planned")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", PlanWarning)
        found = plan(
            model, batch, cluster, mesh=section.mesh, memory=memory, reserve=section.reserve, objective=section.objective,
            optimizer=counted, precision=train.precision, activations=train.activations, stages=section.stages,
            micro_batches=train.micro_batches, time_limit=section.time_limit, progress=say,
        )  # fmt: skip
    for words in dict.fromkeys(str(each.message) for each in caught):
        say(f"warning: {words}")
    known = {key: str(value) for key, value in config.model.settings.items()}
    settings = tuple({"batch": str(train.batch), "seq": str(config.data.seq or 0), **known}.items())
    return replace(found, model=replace(found.model, name=config.model.name, settings=settings))


def loaded(path: Path) -> Plan:
    try:
        return Plan.load(path)
    except (OSError, UnicodeDecodeError) as error:
        raise ScrimpError(f"[cluster] plan: {path} cannot be read: {error}") from error
    except ScrimpError as error:
        raise ScrimpError(f"[cluster] plan: {path}: {error}") from error


def ranks_of(plan: Plan) -> int:
    return plan.mesh.size * (1 if plan.schedule is None else len(plan.schedule.stages))


def _earlier(path: Path | None, ranks: Ranks, say: Say) -> str | None:
    if path is None or not path.exists():
        return None
    found = loaded(path)
    if ranks_of(found) != ranks.world:
        return None
    say(f"the plan is that of {path}, for as many ranks; delete this file to plan again")
    return found.to_json()
