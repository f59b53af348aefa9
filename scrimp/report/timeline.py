"""Timelines as figures: measured and predicted bytes on one axis.

The axis is the number of the schedule step; the points of a schedule step divide it evenly. A prediction that names no schedule
steps, as that of a rehearsal, is stretched over the same length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from scrimp.errors import RunError

MOST_POINTS = 6000  # of a timeline in a report


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A timeline to draw: the place of each point on the axis, its label, and bytes by kind."""

    places: tuple[float, ...]
    labels: tuple[str, ...]
    kinds: Mapping[str, tuple[int, ...]]
    left_out: int = 0  # points that were joined with a neighbour, of which the larger total is shown

    @property
    def totals(self) -> list[int]:
        return [sum(column) for column in zip(*self.kinds.values(), strict=True)]

    def to_data(self) -> dict[str, Any]:
        words = {label: k for k, label in enumerate(dict.fromkeys(self.labels))}
        return {
            "x": [round(place, 4) for place in self.places],
            "words": [*words],
            "label": [words[label] for label in self.labels],
            "kinds": {kind: [*column] for kind, column in self.kinds.items()},
        }


def check_trace(trace: Mapping[str, Any], layers: int, where: str) -> None:
    """A trace whose columns do not have its number of points, or that names unknown layers, was not written by scrimp."""
    try:
        measured = trace["measured"]
        points, kinds, steps = measured["points"], measured["kinds"], measured["schedule_steps"]
        for step, phase, operator, _ in points:
            steps[step], measured["phases"][phase], measured["operators"][operator]
        _check_columns(kinds, len(points), where)
        for stage in steps:
            if not all(0 <= layer < layers for layer in (*stage["layers"], *stage["resident"])):
                raise RunError(f"{where} is of another model: it names layers that the run's {layers} do not have")
        if trace.get("predicted") is not None:
            _check_columns(trace["predicted"]["kinds"], len(trace["predicted"]["schedule_steps"]), where)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise RunError(f"{where} is not a trace of scrimp, or it is damaged: {type(error).__name__} {error}") from error


def check_rehearsal(data: Mapping[str, Any], where: str) -> None:
    points, kinds = data.get("points"), data.get("kinds")
    if not isinstance(points, list) or not isinstance(kinds, dict):
        raise RunError(f"{where} is not a rehearsal of scrimp: it has no list of 'points' and no table of 'kinds'")
    _check_columns(kinds, len(points), where)


def _check_columns(kinds: Mapping[str, Sequence[int]], count: int, where: str) -> None:
    for kind, column in kinds.items():
        if len(column) != count or not all(isinstance(nbytes, int) and nbytes >= 0 for nbytes in column):
            raise RunError(f"{where} is damaged: '{kind}' has {len(column)} sizes for {count} points")


def measured(trace: Mapping[str, Any], layers: Sequence[str]) -> Curve:
    data = trace["measured"]
    steps = [_names(stage, layers) for stage in data["schedule_steps"]]
    places = _spread([point[0] for point in data["points"]])
    labels = tuple(
        f"{data['operators'][operator]}, {data['phases'][phase]} of {steps[step]}" for step, phase, operator, _ in data["points"]
    )
    return thinned(Curve(places=places, labels=labels, kinds={k: tuple(v) for k, v in data["kinds"].items()}))


def predicted(trace: Mapping[str, Any] | None, rehearsal: Mapping[str, Any] | None, layers: Sequence[str]) -> Curve | None:
    """A rehearsal's prediction if there is one, else that of the engine's schedule."""
    if rehearsal is not None:
        count = len(rehearsal["points"])
        steps = len(trace["measured"]["schedule_steps"]) if trace is not None else count
        known = [_number(point) for point in rehearsal["points"]]
        places = (
            _spread([int(step) for step in known if step is not None])
            if count and None not in known
            else tuple(k * steps / max(count, 1) for k in range(count))
        )
        labels = tuple(map(_point_label, rehearsal["points"]))
        return thinned(Curve(places=places, labels=labels, kinds={k: tuple(v) for k, v in rehearsal["kinds"].items()}))
    found = None if trace is None else trace.get("predicted")
    if found is None:
        return None
    stages = found["schedule_steps"]
    return Curve(
        places=tuple(float(k) for k in range(len(stages))),
        labels=tuple(_step_label(stage, layers) for stage in stages),
        kinds={kind: tuple(column) for kind, column in found["kinds"].items()},
    )


def highest(curve: Curve, steps: int) -> list[int]:
    """The highest total in each schedule step; 0 where there is no point."""
    found = [0] * steps
    for place, total in zip(curve.places, curve.totals, strict=True):
        found[int(place)] = max(found[int(place)], total)
    return found


def thinned(curve: Curve, most: int = MOST_POINTS) -> Curve:
    """No more than so many points: of neighbours the one with the largest total stays, so that no peak is lost."""
    count = len(curve.places)
    if count <= most:
        return curve
    totals = curve.totals
    bounds = [k * count // most for k in range(most + 1)]
    kept = [max(range(a, b), key=lambda k: totals[k]) for a, b in pairwise(bounds)]
    return Curve(
        places=tuple(curve.places[k] for k in kept),
        labels=tuple(curve.labels[k] for k in kept),
        kinds={kind: tuple(column[k] for k in kept) for kind, column in curve.kinds.items()},
        left_out=count - most,
    )


def _spread(steps: Sequence[int]) -> tuple[float, ...]:
    """Places of points, given the schedule step of each: those of one step divide it evenly."""
    counts: dict[int, int] = {}
    for step in steps:
        counts[step] = counts.get(step, 0) + 1
    seen: dict[int, int] = {}
    places = []
    for step in steps:
        places.append(step + seen.get(step, 0) / counts[step])
        seen[step] = seen.get(step, 0) + 1
    return tuple(places)


def _step_label(stage: Mapping[str, Any], layers: Sequence[str]) -> str:
    return f"{stage['phase']} of {_names(stage, layers)}"


def _names(stage: Mapping[str, Any], layers: Sequence[str]) -> str:
    return ", ".join(layers[layer] for layer in stage["layers"]) or "the model"


def _number(point: Any) -> int | None:
    found = point.get("schedule_step") if isinstance(point, dict) else None
    return found if isinstance(found, int) else None


def _point_label(point: Any) -> str:
    """A point of a rehearsal is a text, or an object with the names of what runs."""
    if not isinstance(point, dict):
        return str(point)
    names = [
        str(point[key]) for key in ("label", "operator", "op", "phase", "layer", "where") if point.get(key) not in (None, "")
    ]
    return ", ".join(dict.fromkeys(names))
