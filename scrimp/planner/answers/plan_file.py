"""Reads a plan file, and refuses what is none, and what an older scrimp wrote."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from scrimp.cluster import ReservePart
from scrimp.errors import LayoutError, PlanError, check_format
from scrimp.layout import Mesh
from scrimp.planner.answers.plan import (
    KeptWhole,
    Kind,
    Plan,
    PlannedArrival,
    PlannedGroup,
    PlannedInput,
    PlannedLayers,
    PlannedMemory,
    PlannedModel,
    PlannedOp,
    PlannedReserve,
    PlannedStage,
    PlannedWeight,
    Schedule,
)

FORMAT, VERSION = "scrimp.plan", 2


def read(text: str) -> Plan:
    try:
        data = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise PlanError(f"this is not a plan file of scrimp: {error}") from error
    if not isinstance(data, dict):
        raise PlanError(f"this is not a plan file of scrimp: it holds a {type(data).__name__}, not an object")
    if data.get("format") == FORMAT and data.get("version") == 1:
        raise PlanError(
            "this plan file has version 1, which has neither the sizes of split dims nor the model's fingerprint, so that it "
            "cannot be run; plan again with scrimp.plan or `scrimp plan`"
        )
    check_format(data, FORMAT, VERSION, PlanError)
    try:
        made = _plan(data)
        made.summary()  # raises if a field has the wrong type
    except (KeyError, TypeError, ValueError, AttributeError, LayoutError) as error:
        raise PlanError(f"this is not a plan file of scrimp: {type(error).__name__}: {error}") from error
    return made


def _plan(data: dict[str, Any]) -> Plan:
    del data["format"], data["version"]
    schedule = data.pop("schedule", None)
    return Plan(
        mesh=Mesh.parse(data.pop("mesh")),
        memory=_memory(data.pop("memory")),
        schedule=None if schedule is None else _schedule(schedule),
        layers=tuple(_layers(layer) for layer in data.pop("layers")),
        model=_model(data.pop("model")),
        batch=tuple(_input(each) for each in data.pop("batch")),
        whole=tuple(KeptWhole(**each) for each in data.pop("whole")),
        late=tuple(data.pop("late", ())),
        reserve=_reserve(data.pop("reserve", None)),
        **data,
    )


def _memory(data: Mapping[str, Any]) -> PlannedMemory:
    return PlannedMemory(
        peak_nbytes=data["peak_nbytes"], where=data["where"], kinds=tuple(Kind(**kind) for kind in data["kinds"])
    )


def _reserve(data: Mapping[str, Any] | None) -> PlannedReserve | None:
    if data is None:
        return None
    parts = tuple(ReservePart(**part) for part in data["parts"])
    return PlannedReserve(budget_nbytes=data["budget_nbytes"], limit_nbytes=data["limit_nbytes"], parts=parts)


def _model(data: Mapping[str, Any]) -> PlannedModel:
    return PlannedModel(
        graph=data["graph"],
        torch=data["torch"],
        name=data["name"],
        settings=tuple((name, value) for name, value in data["settings"]),
    )


def _input(data: Mapping[str, Any]) -> PlannedInput:
    return PlannedInput(
        name=data["name"],
        shape=tuple(data["shape"]),
        dtype=data["dtype"],
        factors=_factors(data["factors"]),
    )


def _factors(data: Any) -> tuple[tuple[tuple[int, tuple[str, ...]], ...], ...]:
    return tuple(tuple((size, tuple(axes)) for size, axes in dim) for dim in data)


def _schedule(data: Mapping[str, Any]) -> Schedule:
    return Schedule(
        micro_batches=data["micro_batches"],
        bubble=data["bubble"],
        stages=tuple(
            PlannedStage(
                pieces=tuple((first, stop) for first, stop in stage["pieces"]),
                in_flight=stage["in_flight"],
                received=tuple((name, layout) for name, layout in stage["received"]),
                memory=_memory(stage["memory"]),
                seconds=stage["seconds"],
                arrivals=tuple(
                    PlannedArrival(
                        piece=each["piece"], name=each["name"], gradient=each["gradient"], factors=_factors(each["factors"])
                    )
                    for each in stage.get("arrivals", ())
                ),
            )
            for stage in data["stages"]
        ),
    )


def _layers(data: Mapping[str, Any]) -> PlannedLayers:
    return PlannedLayers(
        path=data["path"],
        last=data.get("last", ""),
        first=data["first"],
        count=data["count"],
        groups=tuple(
            PlannedGroup(
                name=group["name"],
                ops=group["ops"],
                sizes=tuple(group["sizes"]),
                split=tuple(group["split"]),
                saved=group["saved"],
                level=tuple(group["level"]),
            )
            for group in data["groups"]
        ),
        ops=tuple(
            PlannedOp(
                name=op["name"], target=op["target"], saved=op["saved"], inputs=tuple(op["inputs"]), outputs=tuple(op["outputs"])
            )
            for op in data["ops"]
        ),
        weights=tuple(
            PlannedWeight(
                name=weight["name"],
                layout=weight["layout"],
                weight_axes=tuple(weight["weight_axes"]),
                gradient_axes=tuple(weight["gradient_axes"]),
                state_axes=tuple(weight["state_axes"]),
            )
            for weight in data["weights"]
        ),
    )
