"""The panels of a run: memory of a step, residency, traffic and time against the bound, exchange, loss, machine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from scrimp.ledger import format_nbytes
from scrimp.report import figures, html, timeline
from scrimp.report.plan_view import cluster_name
from scrimp.report.run_folder import Run

TIERS = ("device", "streamed", "host", "disk")
PLACED = {
    "device": "placed on the device",
    "streamed": "streamed from the host for its update",
    "host": "placed on the host",
    "disk": "states on disk",
}
TIER_COLOURS = {"device": "var(--k4)", "streamed": "var(--k2)", "host": "var(--k0)", "disk": "var(--k1)"}


def layer_names(run: Run) -> list[str]:
    return [layer["path"] or "the model itself" for layer in (run.run or {}).get("layers", ())]


def curves(run: Run) -> tuple[timeline.Curve | None, timeline.Curve | None]:
    """The measured timeline and the predicted one."""
    names = layer_names(run)
    measured = None if run.trace is None else timeline.measured(run.trace, names)
    return measured, timeline.predicted(run.trace, run.rehearsal, names)


def memory_panel(run: Run) -> str:
    measured, predicted = curves(run)
    budget = (run.run or {}).get("settings", {}).get("device_nbytes")
    figure = figures.memory(measured, predicted, budget)
    if figure is None:
        why = "No step was recorded. scrimp.Progress(engine, run=folder) records metered steps; a rehearsal predicts one."
        return html.panel("memory", "Memory over a step", html.words(why, "note"))
    what = f"Step {run.trace['measured']['step']}" if run.trace is not None else "Rehearsed step"
    parts = [html.chart("memory-chart", f"{what}: bytes on the device by kind. Arrow keys move the cursor.", figure)]
    if measured is not None and measured.left_out:
        parts.append(html.words(f"{measured.left_out} points with less than a neighbour are not drawn.", "note"))
    parts += _peaks(run, measured, predicted)
    return html.panel("memory", "Memory over a step", *parts)


def _peaks(run: Run, measured: timeline.Curve | None, predicted: timeline.Curve | None) -> Iterator[str]:
    rows = []
    for name, curve in ((figures.MEASURED, measured), (figures.PREDICTED, predicted)):
        if curve is not None and curve.places:
            totals = curve.totals
            at = max(range(len(totals)), key=lambda k: totals[k])
            rows.append((name, html.nbytes(totals[at]), curve.labels[at]))
    yield html.table("memory-peaks", ("", "peak of the step", "at"), rows)
    told = run.rehearsal or {}
    names = {
        "compute_seconds": "compute, measured", "predicted_seconds": "compute, predicted",
        "communication_seconds": "communication", "overlap_seconds": "communication beside operators",
        "step_seconds": "expected step",
    }  # fmt: skip
    found = [(f"rehearsed, {name}", html.seconds(told[key])) for key, name in names.items() if told.get(key) is not None]
    if found:
        yield html.facts("rehearsed", found)
    if run.trace is not None and run.rehearsal is None and measured is not None and predicted is not None:
        worst, at = difference(measured, predicted)
        yield html.facts(
            "memory-error",
            [("largest difference at a schedule step", html.share(worst)), ("it is at", predicted.labels[at])],
        )
        yield html.words(
            "The prediction is that of the engine's schedule: the weights that it keeps resident, and the peak of everything "
            "else in the traced step.",
            "note",
        )


def difference(measured: timeline.Curve, predicted: timeline.Curve) -> tuple[float, int]:
    """The largest relative difference between the highest totals of a schedule step, and its number."""
    steps = len(predicted.places)
    real, told = (timeline.highest(curve, steps) for curve in (measured, predicted))
    return max((abs(b - a) / a, k) for k, (a, b) in enumerate(zip(real, told, strict=True)) if a)


def residency_panel(run: Run) -> str:
    if run.run is None:
        return html.panel("residency", "Residency of layers", html.words("A plan alone has no run.", "note"))
    layers = run.run["layers"]
    rows = [
        (
            layer["path"] or "the model itself",
            layer["tier"],
            html.nbytes(layer["nbytes"]),
            *(html.nbytes(layer[f"{tier}_nbytes"]) for tier in ("device", "host", "disk")),
        )
        for layer in layers
    ]
    totals = {tier: sum(layer[f"{tier}_nbytes"] for layer in layers) for tier in ("device", "host", "disk")}
    parts = [html.facts("residency-totals", [(f"at rest, {tier}", html.nbytes(size)) for tier, size in totals.items()])]
    if run.trace is not None:
        parts += _grid(run.trace["measured"]["schedule_steps"], layers)
    head = ("layer", "placement", "when resident", "device", "host", "disk")
    table = html.table("residency-table", head, rows, "Bytes of each layer at rest on this rank")
    parts.append(html.details(f"{len(layers)} layers", table))
    return html.panel("residency", "Residency of layers", *parts)


def _grid(stages: Sequence[Mapping[str, Any]], layers: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A row for each layer: where it is resident on the device, over the schedule steps."""
    width = len(stages)
    rows = []
    for k, layer in enumerate(layers):
        resident = [k in stage["resident"] for stage in stages]
        spans = _spans(resident)
        uses = _spans([k in stage["layers"] for stage in stages])
        colour = TIER_COLOURS[layer["tier"]]
        shapes = [f'<rect x="{a}" width="{b - a}" height="1" style="fill:{colour};opacity:.45"/>' for a, b in spans]
        shapes += [f'<rect x="{a}" width="{b - a}" height="1" style="fill:{colour}"/>' for a, b in uses]
        said = f"resident in {sum(resident)} of {width} schedule steps"
        name = layer["path"] or "the model itself"
        rows.append(
            f'<span title="{escape(name)}">{escape(name)}</span>'
            f'<svg viewBox="0 0 {max(width, 1)} 1" preserveAspectRatio="none" role="img" '
            f'aria-label="{escape(name)}: {said}"><title>{said}</title>{"".join(shapes)}</svg>'
        )
    there = dict.fromkeys(layer["tier"] for layer in layers)
    keys = "".join(
        f'<span><span class="swatch" style="background:{TIER_COLOURS[tier]}"></span>{PLACED[tier]}</span>'
        for tier in TIERS
        if tier in there
    )
    yield f'<p class="keys">{keys}<span>full colour: in use; pale: kept or fetched ahead</span></p>'
    yield f'<div class="residency" id="residency-grid">{"".join(rows)}</div>'
    yield html.words(f"From the first to the last of {width} schedule steps of one training step.", "note")


def _spans(flags: Sequence[bool]) -> Iterator[tuple[int, int]]:
    begin = None
    for k, flag in enumerate([*flags, False]):
        if flag and begin is None:
            begin = k
        elif not flag and begin is not None:
            yield begin, k
            begin = None


def traffic_panel(run: Run) -> str:
    parts: list[str] = []
    bound = run.bound
    if bound is not None:
        rows = [
            ("copied to the device", html.nbytes(bound["up_nbytes"]), html.nbytes(bound["least_up_nbytes"])),
            ("copied from the device", html.nbytes(bound["down_nbytes"]), html.nbytes(bound["least_down_nbytes"])),
            ("seconds, the host at its own rate", html.seconds(bound["seconds"]), html.seconds(bound["least_seconds"])),
            ("seconds, physically", html.seconds(bound["seconds"]), html.seconds(bound["physical_seconds"])),
        ]
        parts.append(html.table("bound", ("", "last step", "at least"), rows, "The last step against its lower bound"))
        needs = [(name, html.seconds(value)) for name, value in bound["terms"].items()]
        parts.append(html.table("bound-terms", ("resource", "needs at least"), needs))
        gap = [(name, html.seconds(value)) for name, value in bound["gap"].items()]
        parts.append(html.details("Where the seconds beyond the bound went", html.table("bound-gap", ("cause", "seconds"), gap)))
    else:
        parts.append(html.words("No bound is known: the run ended before the engine had a schedule, or it has no run.", "note"))
    over = figures.over_steps
    parts += _chart("traffic-chart", "Bytes copied in a step", figures.lines(
        [over(run.metrics, "up_nbytes", "to the device"), over(run.metrics, "down_nbytes", "from the device")], unit="bytes"
    ))  # fmt: skip
    parts += _chart("seconds-chart", "Seconds of a step", figures.lines([over(run.metrics, "seconds", "step")], unit="seconds"))
    return html.panel("traffic", "Traffic and time against the bound", *parts)


def exchange_panel(run: Run) -> str:
    settings = (run.run or {}).get("settings", {})
    figure = figures.lines([figures.over_steps(run.metrics, "received_nbytes", "received")], unit="bytes")
    if settings.get("ranks", 1) == 1 or figure is None:
        why = "One rank exchanges nothing." if settings.get("ranks") == 1 else "No exchange was measured."
        return html.panel("exchange", "Exchange between ranks", html.words(why, "note"))
    total = sum(row.get("received_nbytes") or 0 for row in run.metrics)
    return html.panel(
        "exchange",
        "Exchange between ranks",
        html.facts(
            "exchange-facts",
            [
                ("ranks", settings["ranks"]),
                ("exchange", settings["exchange"]),
                ("received in the run", html.nbytes(total)),
                ("a step", html.nbytes(total // max(len(run.metrics), 1))),
            ],
        ),
        html.chart("exchange-chart", "Bytes that rank 0 received from other ranks in a step", figure),
    )


def loss_panel(run: Run) -> str:
    validated = [row for row in run.metrics if row.get("validation_loss") is not None]
    lines = [figures.over_steps(run.metrics, "loss", "loss"), figures.over_steps(validated, "validation_loss", "validation loss")]
    figure = figures.lines(lines, unit="plain", zero=False)
    if figure is None:
        why = "No metrics are known. scrimp.Progress(engine, run=folder) writes them."
        return html.panel("loss", "Loss", html.words(why, "note"))
    rates = figures.lines([figures.over_steps(run.metrics, "lr", "learning rate")], unit="plain")
    parts = [html.chart("loss-chart", "Loss of each step", figure), *_chart("lr-chart", "Learning rate", rates)]
    return html.panel("loss", "Loss", *parts)


def machine_panel(run: Run) -> str:
    if run.machine is None:
        return html.panel("machine", "Machine and versions", html.words("No machine is known.", "note"))
    rows = [(name, str(value)) for name, value in run.machine.items() if isinstance(value, (str, int)) and name not in HEAD]
    sizes = [
        (name.removesuffix("_nbytes").replace("_", " "), html.nbytes(int(v))) for name, v in rows if name.endswith("_nbytes")
    ]
    plain: list[tuple[str, html.Content]] = [(name, text) for name, text in rows if not name.endswith("_nbytes")]
    parts = [html.facts("machine-facts", [*plain, *sizes])]
    parts.append(html.table("versions", ("package", "version"), [*run.machine["versions"].items()]))
    rates = (run.bound or {}).get("machine")
    if rates:
        measured = [(name.replace("_", " "), _rate(name, value)) for name, value in rates.items()]
        parts.append(html.table("rates", ("measured", ""), measured))
    return html.panel("machine", "Machine and versions", *parts)


HEAD = ("format", "version")


def summary_rows(run: Run) -> Iterator[tuple[str, html.Content]]:
    """The figures that people ask for first, also of a comparison."""
    settings, ledgers = (run.run or {}).get("settings", {}), (run.run or {}).get("ledgers", {})
    if run.run is not None:
        yield "model", str(run.run["model"])
        yield "parameters", html.count(run.run["numel"])
        yield "steps", int(run.run["steps"])
    losses = [row["loss"] for row in run.metrics if row.get("loss") is not None]
    if losses:
        yield "last loss", html.number(losses[-1])
    if ledgers:
        yield "peak on the device", html.nbytes(ledgers["device"]["peak_nbytes"])
        yield "budget of the device", html.nbytes(settings.get("device_nbytes"))
        yield "peak on the host", html.nbytes(ledgers["host"]["peak_nbytes"])
    if run.plan is not None:
        yield "planned peak", html.nbytes(run.plan["memory"]["peak_nbytes"])
        yield "planned step", html.seconds(run.plan["seconds"])
        yield "mesh", str(run.plan["mesh"])
        yield "cluster", cluster_name(run.plan)
    times = sorted(row["seconds"] for row in run.metrics if row.get("seconds") is not None)
    if times:
        yield "step, median", html.seconds(times[len(times) // 2])
    rates = sorted(row["tokens_per_second"] for row in run.metrics if row.get("tokens_per_second") is not None)
    if rates:
        yield "tokens a second, median", html.count(round(rates[len(rates) // 2]))
    said = settings or run.plan or {}
    yield "precision", str(said.get("precision", html.NONE))
    yield "optimizer", str(said.get("optimizer", html.NONE))
    if settings:
        yield "ranks", int(settings["ranks"])
        yield "activations", str(settings["activations"])
        yield "exchange", str(settings["exchange"])


def peak_table(run: Run) -> list[str]:
    """The ledger's peak on the device by kind."""
    peak = (run.run or {}).get("ledgers", {}).get("device", {}).get("peak")
    if not peak:
        return []
    kinds = [(kind, size) for kind, size in peak["by_kind"].items() if size]
    total = sum(size for _, size in kinds)
    return [
        html.heading(f"Peak on the device, {peak['when']}"),
        html.bar(kinds, total),
        html.table("ledger-peak", ("kind", "bytes"), [(html.swatch(kind), html.nbytes(size)) for kind, size in kinds]),
        html.words(f"{format_nbytes(total)} in all.", "note"),
    ]


def _rate(name: str, value: float | str) -> html.Content:
    if isinstance(value, str) or name == "threads":
        return str(value)
    size, unit = (1e12, "TFLOP/s") if name == "flops" else (1e9, "GB/s")
    return html.Cell(text=f"{value / size:.4g} {unit}", value=value)


def _chart(key: str, title: str, figure: dict[str, Any] | None) -> list[str]:
    return [] if figure is None else [html.chart(key, title, figure)]
