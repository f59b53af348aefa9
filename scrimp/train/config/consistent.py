"""Keys that exclude each other, and keys that would have no effect: both are errors."""

from __future__ import annotations

from scrimp.errors import ScrimpError
from scrimp.train.config.resolved import SET, Resolved
from scrimp.train.config.sections import AUTO, NONE

SOURCES = ("text", "tokens", "dataset", "function")
ADAMW, SGD = ("betas", "eps", "state"), ("momentum", "dampening", "nesterov")
SPARSE = ("density", "warm_up", "values", "residual", "mesh", "axis")
FALLING = ("linear", "cosine")
PLANNING = ("mesh", "objective", "stages", "reserve", "time_limit")


def check_consistent(resolved: Resolved) -> None:
    config, name = resolved.config, resolved.name
    sources = [source for source in SOURCES if getattr(config.data, source)]
    if len(sources) != 1:
        found = f"it has {' and '.join(sources)}" if sources else "it has none of them"
        raise ScrimpError(f"{name}: [data] takes exactly one of {', '.join(SOURCES)}; {found}")
    source = sources[0]
    optimizer, kind, plan = config.optimizer.name, config.exchange.kind, config.cluster.plan
    # Keys, the key that decides whether they are used, whether they are, and the words of the error.
    rows: list[tuple[str, tuple[str, ...], str, bool, str]] = [
        ("data", ("split", "column"), f"data.{source}", source == "dataset", f"with {source}"),
        ("data", ("dtype",), f"data.{source}", source == "tokens", f"with {source}"),
        ("data", ("seq",), "data.function", source != "function", "with function, which makes the samples"),
        (
            "tokenizer",
            ("name",),
            f"data.{source}",
            source in ("text", "dataset"),
            f"with data.{source}, which needs no tokenizer",
        ),
        ("optimizer", ADAMW, "optimizer.name", optimizer == "adamw", f"with name = '{optimizer}'"),
        ("optimizer", SGD, "optimizer.name", optimizer == "sgd", f"with name = '{optimizer}'"),
        ("exchange", SPARSE, "exchange.kind", kind == "sparse", f"with kind = '{kind}'"),
        ("exchange", ("mesh",), "cluster.plan", plan == NONE, "with a plan, which has a mesh; use exchange.axis"),
        ("exchange", ("axis",), "cluster.plan", plan != NONE, "without a plan"),
        ("cluster", PLANNING, "cluster.plan", plan == AUTO, f"with plan = '{plan}'"),
        ("schedule", ("final",), "schedule.kind", config.schedule.kind in FALLING, f"with '{config.schedule.kind}'"),
        ("validation", ("share", "batches"), "validation.every", config.validation.every > 0, "with every = 0"),
    ]
    for section, keys, decided, used, why in rows:
        _no_effect(resolved, section, () if used else keys, decided, why)
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


def _no_effect(resolved: Resolved, section: str, keys: tuple[str, ...], decided: str, why: str) -> None:
    """`decided`: the key that makes these unused. Where --set changed it, keys of the file may stay."""
    for key in keys:
        where = resolved.origins[f"{section}.{key}"]
        if resolved.differs(section, key) and not (resolved.origins[decided] == SET != where):
            raise ScrimpError(f"{where}: [{section}] {key} has no effect {why}; leave it out")
