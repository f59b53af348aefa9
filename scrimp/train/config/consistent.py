"""Keys that exclude each other, and keys that would have no effect: both are errors."""

from __future__ import annotations

from scrimp.errors import ScrimpError
from scrimp.train.config.resolved import Resolved
from scrimp.train.config.sections import AUTO, NONE

SOURCES = ("text", "tokens", "dataset", "function")
ADAMW, SGD = ("betas", "eps", "state"), ("momentum", "dampening", "nesterov")
SPARSE = ("density", "warm_up", "values", "residual", "mesh", "axis")
PLANNING = ("mesh", "objective", "stages", "reserve", "time_limit")


def check_consistent(resolved: Resolved) -> None:
    config, name = resolved.config, resolved.name
    sources = [source for source in SOURCES if getattr(config.data, source)]
    if len(sources) != 1:
        found = f"it has {' and '.join(sources)}" if sources else "it has none of them"
        raise ScrimpError(f"{name}: [data] takes exactly one of {', '.join(SOURCES)}; {found}")
    source = sources[0]
    _no_effect(resolved, "data", ("split", "column"), source == "dataset", f"with {source}")
    _no_effect(resolved, "data", ("dtype",), source == "tokens", f"with {source}")
    _no_effect(resolved, "data", ("seq",), source != "function", "with function, which makes the samples")
    _no_effect(resolved, "tokenizer", ("name",), source in ("text", "dataset"), f"with data.{source}, which needs no tokenizer")
    optimizer = config.optimizer.name
    _no_effect(resolved, "optimizer", ADAMW, optimizer == "adamw", f"with name = '{optimizer}'")
    _no_effect(resolved, "optimizer", SGD, optimizer == "sgd", f"with name = '{optimizer}'")
    _no_effect(resolved, "exchange", SPARSE, config.exchange.kind == "sparse", f"with kind = '{config.exchange.kind}'")
    _no_effect(resolved, "exchange", ("mesh",), config.cluster.plan == NONE, "with a plan, which has a mesh; use exchange.axis")
    _no_effect(resolved, "exchange", ("axis",), config.cluster.plan != NONE, "without a plan")
    _no_effect(resolved, "cluster", PLANNING, config.cluster.plan == AUTO, f"with plan = '{config.cluster.plan}'")
    _no_effect(resolved, "schedule", ("final",), config.schedule.kind in ("linear", "cosine"), f"with '{config.schedule.kind}'")
    _no_effect(resolved, "validation", ("share", "batches"), config.validation.every > 0, "with every = 0")
    if config.schedule.warm_up > config.train.steps:
        raise ScrimpError(
            f"{name}: [schedule] warm_up is {config.schedule.warm_up} steps, and [train] steps is {config.train.steps}: "
            "the rate would never reach its value"
        )
    if config.train.batch % config.train.micro_batches:
        raise ScrimpError(
            f"{name}: [train] batch is {config.train.batch}, which {config.train.micro_batches} micro_batches do not divide"
        )
    for number, group in enumerate(config.optimizer.groups):
        if not isinstance(group.get("params"), str):
            raise ScrimpError(f"{name}: [[optimizer.groups]] number {number} has no params, a pattern such as '*.bias'")


def _no_effect(resolved: Resolved, section: str, keys: tuple[str, ...], used: bool, why: str) -> None:
    for key in keys if not used else ():
        if resolved.differs(section, key):
            where = resolved.origins[f"{section}.{key}"]
            raise ScrimpError(f"{where}: [{section}] {key} has no effect {why}; leave it out")
