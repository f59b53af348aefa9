"""The panels of a plan: its figures, the layout of every layer, reasons and prices, the Pareto front."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from scrimp.cluster import Cluster, ReservePart
from scrimp.errors import ScrimpError
from scrimp.layout import Mesh
from scrimp.ledger import format_nbytes
from scrimp.report import figures, html
from scrimp.report.run_folder import intact

Plan = Mapping[str, Any]


def plan_panel(plan: Plan | None) -> str:
    title = "Plan"
    if plan is None:
        return html.panel(
            "plan", title, html.words("This run follows no plan: the engine chose placements while it ran.", "note")
        )
    with intact("the plan"):
        parts = [
            html.facts("plan-facts", _facts(plan)),
            *_peak(plan["memory"]),
            *_beside(plan),
            *_stages(plan),
            html.heading("Layers and layouts"),
            html.words(
                "A layout names, for each dim, the mesh axes that split it; - is a dim that is not split. "
                "Between steps, weights, gradients and optimizer states are also split over the axes on the right.",
                "note",
            ),
            *_layers(plan["layers"]),
            *_whole(plan.get("whole") or ()),
        ]
    return html.panel("plan", title, *parts)


def choices_panel(plan: Plan | None, choices: Mapping[str, Any]) -> str:
    """Why the choices, what the next best costs, and the Pareto front: known in the process that made the plan."""
    title = "Alternatives"
    parts: list[str] = []
    for each in choices.get("explained", ()):
        groups = [part for k, group in enumerate(each["groups"]) for part in _prices(group, f"price-{_key(each['name'])}-{k}")]
        parts.append(html.details(f"{each['name']}: {len(each['groups'])} groups of operators", *groups))
    if parts:
        told = (
            "The solver searched again with one choice forbidden. What the next best adds to the peak and to a step is its price."
        )
        parts = [html.heading("Prices of the next best choices"), html.words(told, "note"), *parts]
    front = choices.get("front", ())
    if front:
        chosen = (plan or {}).get("memory", {}).get("peak_nbytes")
        line = figures.Line(
            name="Pareto front",
            steps=[point["peak_nbytes"] for point in front],
            values=[point["seconds"] for point in front],
            dots=[6 if point["peak_nbytes"] == chosen else 4 for point in front],
        )
        found = figures.lines([line], unit="seconds", x_label="peak of a device", x_unit="bytes")
        rows = [(html.nbytes(point["peak_nbytes"]), html.seconds(point["seconds"])) for point in front]
        parts += [html.heading("Pareto front"), html.chart("front-chart", "Step time against peak memory", found or {})]
        parts.append(html.table("front", ("peak of a device", "step"), rows))
    if not parts:
        why = "There is no plan." if plan is None else "plan.report(path), in the process that made the plan, adds them."
        parts = [html.words(f"No prices of alternatives and no Pareto front are known. {why}", "note")]
    return html.panel("alternatives", title, *parts)


PRICES = ("choice", "chosen", "next best", "peak", "step")


def _prices(group: Mapping[str, Any], key: str) -> list[str]:
    held = ", ".join(f"{kind} {format_nbytes(size)}" for kind, size in group["held"]) or "nothing"
    layers = f"{len(group['layers'])} layers choose together; " if len(group["layers"]) > 1 else ""
    rows = [
        (
            choice["what"],
            _code("; ".join(choice["chosen"])),
            choice["why_none"] if best is None else _code("; ".join(best["chosen"])),
            html.nbytes(None) if best is None else _more(best["peak_nbytes"]),
            html.seconds(None) if best is None else html.seconds(best["seconds"]),
        )
        for choice in group["choices"]
        for best in (choice["next_best"],)
    ]
    return [html.heading(group["name"]), html.words(f"{layers}at the peak: {held}", "note"), html.table(key, PRICES, rows)]


def _more(size: int) -> html.Cell:
    sign = "+" if size > 0 else "-" if size < 0 else ""
    return html.Cell(text=f"{sign}{format_nbytes(abs(size))}", value=size)


def cluster_name(plan: Plan) -> str:
    try:
        hardware = json.loads(plan["cluster"]).get("hardware")
        return f"{hardware['nodes'] * hardware['devices_per_node']} x {hardware['kind']}" if hardware else "without device data"
    except (KeyError, TypeError, ValueError, AttributeError):
        return "unknown"


def _facts(plan: Plan) -> Iterator[tuple[str, html.Content]]:
    memory = plan["memory"]
    model = plan.get("model") or {}
    if model.get("name"):
        yield "model", str(model["name"])
    yield "mesh", str(plan["mesh"])
    yield "cluster", cluster_name(plan)
    yield "peak of a device", html.nbytes(memory["peak_nbytes"])
    yield "without replicas", html.nbytes(memory["peak_nbytes"] - sum(kind["redundant_nbytes"] for kind in memory["kinds"]))
    yield "step", html.seconds(plan["seconds"])
    yield "optimality gap", html.share(plan["gap"])
    yield "gap of the seconds", html.share(plan["seconds_gap"])
    if plan.get("bound_nbytes"):
        yield "lower bound of the peak", html.nbytes(plan["bound_nbytes"])
    yield "objective", str(plan["objective"])
    yield "precision", str(plan["precision"])
    yield "optimizer", str(plan["optimizer"])


def _peak(memory: Mapping[str, Any]) -> list[str]:
    kinds = sorted((kind for kind in memory["kinds"] if kind["nbytes"]), key=lambda kind: html.order(kind["kind"]))
    rows = [(html.swatch(k["kind"]), html.nbytes(k["nbytes"]), html.nbytes(k["redundant_nbytes"])) for k in kinds]
    return [
        html.heading(f"Peak of a device, at {memory['where']}"),
        html.bar([(kind["kind"], kind["nbytes"]) for kind in kinds], memory["peak_nbytes"]),
        html.table("plan-peak", ("kind", "bytes", "of them replicated"), rows),
    ]


def _beside(plan: Plan) -> list[str]:
    """What a device needs beside the plan: as the plan's budget reserves it; else as its kind of devices needs it."""
    reserve = plan.get("reserve")
    if reserve:
        parts = tuple(ReservePart(**part) for part in reserve["parts"])
        budget, limit = format_nbytes(reserve["budget_nbytes"]), format_nbytes(reserve["limit_nbytes"])
        said = f"The budget of {budget} keeps these bytes free; the plan may use {limit}."
    else:
        parts = _expected(plan)
        said = "A device needs these bytes beside the peak. The plan's budget does not count them."
    if not parts:
        return []
    rows = [(part.name, html.nbytes(part.nbytes), part.source) for part in parts]
    return [html.heading("Beside the plan"), html.words(said, "note"), html.table("beside", ("part", "bytes", "known"), rows)]


def _expected(plan: Plan) -> tuple[ReservePart, ...]:
    schedule = plan.get("schedule")
    try:
        cluster, mesh = Cluster.from_json(plan["cluster"]), Mesh.parse(plan["mesh"])
    except (ScrimpError, KeyError, TypeError, ValueError, AttributeError):
        return ()  # a cluster that cannot be read is shown as unknown
    return cluster.beside(plan["memory"]["peak_nbytes"], mesh, len(schedule["stages"]) if schedule else 1)


def _stages(plan: Plan) -> list[str]:
    schedule = plan.get("schedule")
    if not schedule:
        return []
    rows = [
        (
            f"stage {k}",
            ", ".join(f"{first} to {stop - 1}" for first, stop in stage["pieces"]),
            stage["in_flight"],
            html.nbytes(stage["memory"]["peak_nbytes"]),
            html.seconds(stage["seconds"]),
        )
        for k, stage in enumerate(schedule["stages"])
    ]
    said = f"{schedule['micro_batches']} micro-batches; devices wait {schedule['bubble']:.1%} of a step"
    return [html.heading("Pipeline"), html.table("stages", ("", "layers", "in flight", "peak", "works"), rows, said)]


def _layers(layers: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for k, each in enumerate(layers):
        span = each["path"] or "the model"
        if each["count"] > 1:
            span += f" to {each['last']}" if each.get("last") else f" and {each['count'] - 1} more"
        ways = Counter(op["saved"] for op in each["ops"])
        said = f"{span}: {each['count']} layer{'s' if each['count'] > 1 else ''}, " + ", ".join(
            f"{count} operators {way}" for way, count in ways.items()
        )
        weights = [
            (
                weight["name"].removeprefix(f"{each['path']}."),
                _code(weight["layout"]),
                *("*".join(weight[axes]) or html.NONE for axes in ("weight_axes", "gradient_axes", "state_axes")),
            )
            for weight in each["weights"]
        ]
        head = ("weight", "in use", "weight over", "gradient over", "states over")
        ops = [
            (
                op["name"],
                op["target"],
                op["saved"],
                _code(" ".join(op["inputs"])),
                _code(" ".join(o or html.NONE for o in op["outputs"])),
            )
            for op in each["ops"]
        ]
        parts = [html.table(f"weights-{k}", head, weights)] if weights else []
        inner = html.details(
            f"{len(ops)} operators", html.table(f"ops-{k}", ("operator", "target", "activations", "inputs", "outputs"), ops)
        )
        yield html.details(said, *parts, inner)


def _whole(whole: Sequence[Mapping[str, Any]]) -> list[str]:
    if not whole:
        return []
    rows = [(w["target"], w["where"], w["times"], html.nbytes(w["redundant_nbytes"]), html.seconds(w["seconds"])) for w in whole]
    head = ("operator", "first call", "times", "replicated", "added to a step")
    return [html.heading("Operators without a rule, which every device runs whole"), html.table("whole", head, rows)]


def _code(text: str) -> html.Markup:
    return html.Markup(html=f'<span class="code">{escape(text)}</span>')


def _key(name: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in name)
