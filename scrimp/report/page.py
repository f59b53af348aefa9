"""The report of one run or plan as one HTML page that needs nothing else: no other file, no network."""

from __future__ import annotations

from functools import cache
from html import escape
from importlib.resources import files

from scrimp.report import html, run_view
from scrimp.report.plan_view import choices_panel, plan_panel
from scrimp.report.run_folder import Run, intact

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def page(run: Run) -> str:
    """Pure: the same run gives the same text."""
    with intact(run.name):
        lead = _lead(run)
        panels = [
            html.panel("summary", "Summary", html.facts("summary-facts", run_view.summary_rows(run)), *run_view.peak_table(run)),
            plan_panel(run.plan),
            choices_panel(run.plan, run.choices),
            run_view.memory_panel(run),
            run_view.residency_panel(run),
            run_view.traffic_panel(run),
            run_view.exchange_panel(run),
            run_view.loss_panel(run),
            run_view.machine_panel(run),
        ]
    return document(f"{'Plan' if run.run is None else 'Run'} {run.name}", lead, panels)


def document(title: str, lead: str, panels: list[str]) -> str:
    links = "".join(f'<li><a href="#{key}">{key.capitalize()}</a></li>' for key in map(_key, panels))
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">',
            f"<title>{escape(title)}</title><style>{asset('style.css')}</style></head><body>",
            '<a class="skip" href="#main">Skip to the report</a>',
            f"<header><h1>{escape(title)}</h1><p class='lead'>{escape(lead)}</p></header>",
            f'<nav aria-label="Panels"><ul>{links}</ul></nav>',
            "<noscript><p class='note'>Charts need JavaScript. Tables have their main figures.</p></noscript>",
            f'<main id="main">{"".join(panels)}</main>',
            "<footer>Made by scrimp. This file is complete: it loads nothing.</footer>",
            f"<script>{asset('script.js')}</script></body></html>",
            "",
        ]
    )


def _key(panel: str) -> str:
    return panel.partition('id="')[2].partition('"')[0]


def _lead(run: Run) -> str:
    if run.run is None:
        return "A plan: predicted memory and time, and the layout of every tensor."
    ended = f"ended {run.run['ended']}" if run.run.get("ended") else "not ended"
    return f"Began {run.run['began']}, {ended}. scrimp {run.run['scrimp']}. Figures of rank 0."


@cache
def asset(name: str) -> str:
    return (files("scrimp.report") / "assets" / name).read_text(encoding="utf-8")
