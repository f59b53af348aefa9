"""Reports in a headless Chromium: no errors, no requests, every panel, the numbers of the JSON files, a phone, dark, keyboard."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import scrimp
from scrimp import report
from tests.report.chromium import Page, browser_path, browsing
from tests.report.runs import longer, plan_text, trained

PANELS = ["summary", "plan", "alternatives", "memory", "residency", "traffic", "exchange", "loss", "machine"]

pytestmark = pytest.mark.skipif(
    browser_path() is None, reason="no Chromium on this machine: apt-get install chromium, or brew install chromium"
)


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    path = browser_path()
    assert path is not None
    with browsing(path) as opened:
        yield opened


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("runs") / "small")


@pytest.fixture(scope="module")
def written(run: Path) -> Path:
    (run / "plan.json").write_text(plan_text())
    path = run.parent / "report.html"
    report.write(run, path)
    return path


def data(run: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / name).read_text())
    return found


def check_quiet(page: Page, path: Path) -> None:
    """Nothing was said, nothing was loaded but the file, and the script came to its end."""
    assert page.errors == []
    assert page.messages == []
    assert page.requests == [path.as_uri()]
    assert page.run("document.documentElement.dataset.drawn") == "yes"


def facts(page: Page, key: str) -> dict[str, Any]:
    """Exact numbers of a list of facts; the text where there is none."""
    code = f"""[...document.querySelectorAll('#{key} > div')].map(each => {{
        const dd = each.querySelector('dd');
        return [each.querySelector('dt').textContent, dd.dataset.value ? JSON.parse(dd.dataset.value) : dd.textContent];
    }})"""
    return dict(page.run(code))


def rows(page: Page, key: str) -> list[list[Any]]:
    code = f"""[...document.querySelectorAll('#{key} tbody tr')].map(row => [...row.cells].map(
        cell => cell.dataset.value ? JSON.parse(cell.dataset.value) : cell.textContent))"""
    found: list[list[Any]] = page.run(code)
    return found


def readout(page: Page, key: str) -> tuple[str, dict[str, list[Any]]]:
    code = f"""[document.querySelector('#{key} .readout b').textContent,
        [...document.querySelectorAll('#{key} .readout tr')].map(row => [...row.cells].map(
            cell => cell.dataset.value ? JSON.parse(cell.dataset.value) : cell.textContent))]"""
    title, found = page.run(code)
    return title, {name: values for name, *values in found}


def test_a_report_is_quiet_and_has_every_panel(page: Page, run: Path, written: Path) -> None:
    page.open(written)
    check_quiet(page, written)
    assert page.run("[...document.querySelectorAll('main > section')].map(each => each.id)") == PANELS
    links = page.run("[...document.querySelectorAll('nav a')].map(each => each.getAttribute('href'))")
    assert links == [f"#{name}" for name in PANELS]
    drawn = page.run(
        "[...document.querySelectorAll('figure.chart')].map(e => e.querySelectorAll('svg path, svg polygon').length)"
    )
    assert len(drawn) >= 5
    assert min(drawn) >= 1


def test_numbers_are_those_of_the_files(page: Page, run: Path, written: Path) -> None:
    page.open(written)
    settings, bound, plan, metrics = (
        data(run, "run.json"),
        data(run, "bound.json"),
        data(run, "plan.json"),
        scrimp.read_metrics(run / "metrics.jsonl"),
    )
    summary = facts(page, "summary-facts")
    assert summary["peak on the device"] == settings["ledgers"]["device"]["peak_nbytes"]
    assert summary["budget of the device"] == settings["settings"]["device_nbytes"]
    assert summary["parameters"] == settings["numel"]
    assert summary["steps"] == len(metrics)
    assert summary["last loss"] == metrics[-1]["loss"]
    peak = {kind: size for kind, size in settings["ledgers"]["device"]["peak"]["by_kind"].items() if size}
    assert dict(rows(page, "ledger-peak")) == peak
    assert facts(page, "plan-facts")["peak of a device"] == plan["memory"]["peak_nbytes"]
    assert facts(page, "plan-facts")["step"] == plan["seconds"]
    assert {row[0]: row[1] for row in rows(page, "plan-peak")} == {
        kind["kind"]: kind["nbytes"] for kind in plan["memory"]["kinds"] if kind["nbytes"]
    }
    assert [row[1:] for row in rows(page, "bound")] == [
        [bound["up_nbytes"], bound["least_up_nbytes"]],
        [bound["down_nbytes"], bound["least_down_nbytes"]],
        [bound["seconds"], bound["least_seconds"]],
        [bound["seconds"], bound["physical_seconds"]],
    ]
    assert [row[3:] for row in rows(page, "residency-table")] == [
        [layer["device_nbytes"], layer["host_nbytes"], layer["disk_nbytes"]] for layer in settings["layers"]
    ]
    assert [row[1] for row in rows(page, "versions")] == [*data(run, "machine.json")["versions"].values()]
    code = "JSON.parse(document.querySelector('#loss-chart script').textContent).series[0].y"
    assert page.run(code) == [row["loss"] for row in metrics]


def test_the_cursor_shows_each_point_of_the_trace(page: Page, run: Path, written: Path) -> None:
    """By keyboard: tab into the chart, then one point after the other."""
    page.open(written)
    trace = data(run, "trace.json")
    measured, predicted = trace["measured"], trace["predicted"]
    page.run("document.querySelector('#memory-chart .plot').focus()")
    page.key("Home")
    layers = [layer["path"] for layer in data(run, "run.json")["layers"]]
    for at, (step, phase, operator, _) in enumerate(measured["points"]):
        title, found = readout(page, "memory-chart")
        names = ", ".join(layers[layer] for layer in measured["schedule_steps"][step]["layers"])
        assert title == f"{measured['operators'][operator]}, {measured['phases'][phase]} of {names}"
        here = {kind: column[at] for kind, column in measured["kinds"].items()}
        told = {kind: column[step] for kind, column in predicted["kinds"].items()}
        assert found["in all"] == [sum(here.values()), sum(told.values())]
        for kind in {*here, *told} & {*found}:
            assert found[kind][0] == here.get(kind)
            assert found[kind][1] == told.get(kind)
        assert {kind for kind, size in here.items() if size} <= {*found}
        page.key("ArrowRight")
    assert page.run("document.querySelector('#memory-chart .plot').getAttribute('aria-valuenow')") == str(
        len(measured["points"]) - 1
    )


def test_a_kind_can_be_hidden_by_keyboard(page: Page, run: Path, written: Path) -> None:
    page.open(written)
    _, before = readout(page, "memory-chart")
    page.run("[...document.querySelectorAll('#memory-chart button')].find(b => b.textContent === 'activations').focus()")
    page.key("Enter")
    _, after = readout(page, "memory-chart")
    assert after["in all"][0] == before["in all"][0] - before["activations"][0]
    assert "activations" not in after


def test_everything_is_reached_by_the_tab_key(page: Page, written: Path) -> None:
    page.open(written)
    page.run("document.body.focus()")
    wanted = page.run("document.querySelectorAll('a, button, [tabindex], summary').length")
    seen = set()
    for _ in range(wanted + 2):
        page.key("Tab")
        seen.add(page.run("(e => e.id || e.getAttribute('href') || e.className || e.textContent)(document.activeElement)"))
    assert {"plot", "#memory", "skip", "#main"} & seen >= {"plot", "#memory"}
    assert page.run("document.querySelectorAll('.plot[role=slider][aria-label][aria-valuetext]').length") >= 5


@pytest.mark.parametrize("dark", [False, True])
def test_a_phone_needs_no_horizontal_scroll(page: Page, written: Path, dark: bool) -> None:
    page.open(written, width=380, height=800, dark=dark)
    check_quiet(page, written)
    page.run("document.querySelectorAll('details').forEach(each => each.open = true)")
    assert page.run("document.documentElement.scrollWidth") <= 380
    wide = """[...document.querySelectorAll('main *')].filter(each => !each.closest('.scroll, svg')
        && each.getBoundingClientRect().right > 380.5).map(each => each.outerHTML.slice(0, 80))"""
    assert page.run(wide) == []
    assert page.run("parseFloat(getComputedStyle(document.body).fontSize)") >= 14


def luminance(colour: str) -> float:
    red, green, blue = (int(part) / 255 for part in colour.removeprefix("rgb(").removesuffix(")").split(","))
    parts = [each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in (red, green, blue)]
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]


@pytest.mark.parametrize("dark", [False, True])
def test_text_has_contrast_in_light_and_dark(page: Page, written: Path, dark: bool) -> None:
    """WCAG 2.1 asks for 4.5 to 1 for text, and for 3 to 1 for parts of a chart."""
    page.open(written, dark=dark)
    code = """(name, style) => {
        const made = document.createElement('i'); document.body.append(made); made.style.color = name;
        const found = getComputedStyle(made).color; made.remove(); return found; }"""
    names = ("page", "card", "ink", "soft", "accent", "bad", *(f"s{k}" for k in range(6)), *(f"k{k}" for k in range(8)))
    of = {name: luminance(page.run(f"({code})('var(--{name})')")) for name in names}

    def contrast(one: str, other: str) -> float:
        light, low = max(of[one], of[other]), min(of[one], of[other])
        return (light + 0.05) / (low + 0.05)

    assert (of["card"] < 0.1) is dark
    for name in ("ink", "soft", "accent", "bad"):
        assert min(contrast(name, "card"), contrast(name, "page")) >= 4.5, name
    for name in (*(f"s{k}" for k in range(6)), "k0", "k2", "k3", "k4", "k5"):
        assert contrast(name, "card") >= 3, name


def test_a_run_of_32_layers_and_1000_steps_is_small(page: Page, tmp_path: Path) -> None:
    memory = scrimp.Memory(device="4MiB", host="8MiB", disk=tmp_path)
    run = trained(tmp_path / "large", steps=4, layers=32, memory=memory)
    longer(run, 1000)
    path = tmp_path / "report.html"
    report.write(run, path)
    assert len(data(run, "trace.json")["measured"]["points"]) > 1000
    assert path.stat().st_size < 3 * 1024**2
    page.open(path, width=380, height=800)
    check_quiet(page, path)
    assert page.run("document.documentElement.scrollWidth") <= 380
    assert page.run("document.querySelectorAll('#residency-grid svg').length") == len(data(run, "run.json")["layers"])


def test_a_comparison(page: Page, run: Path, written: Path, tmp_path: Path) -> None:
    (tmp_path / "kept.json").write_text(plan_text(activations="keep"))
    path = tmp_path / "compare.html"
    report.compare([run, tmp_path / "kept.json", run], path)
    for width in (380, 1280):
        page.open(path, width=width)
        check_quiet(page, path)
        assert page.run("document.documentElement.scrollWidth") <= width
    assert page.run("[...document.querySelectorAll('#compared thead th')].map(e => e.textContent)") == [
        "",
        "small 1",
        "kept",
        "small 3",
    ]
    peaks = {name: values for name, *values in rows(page, "peaks")}
    planned = {kind["kind"]: kind["nbytes"] for kind in data(tmp_path, "kept.json")["memory"]["kinds"]}
    measured = data(run, "run.json")["ledgers"]["device"]["peak"]["by_kind"]
    assert peaks["activations"] == [measured["activations"], planned["activations"], measured["activations"]]


def test_names_are_text_and_never_markup(page: Page, run: Path, tmp_path: Path) -> None:
    """A model may name its layers as it likes."""
    settings, evil = data(run, "run.json"), "<img src=x onerror=alert(1)></script><script>alert(2)</script>"
    settings["layers"][0]["path"] = settings["model"] = evil
    folder = tmp_path / "evil"
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps(settings))
    for name in ("trace.json", "metrics.jsonl"):
        (folder / name).write_text((run / name).read_text())
    path = tmp_path / "evil.html"
    report.write(folder, path)
    page.open(path)
    check_quiet(page, path)
    assert facts(page, "summary-facts")["model"] == evil
    assert page.run("document.querySelectorAll('img').length") == 0
