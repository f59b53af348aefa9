"""The documentation: its Python code runs, its links resolve, its reference names every public name, and its pages are short."""

from __future__ import annotations

import doctest
import gc
import inspect
import re
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist

import scrimp
from scrimp.rules.ops import registry
from tests.docs import commands_page

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
GENERATED = DOCS / "results" / "raw"
PAGES = [path for path in sorted(DOCS.rglob("*.md")) if GENERATED not in path.parents] + [ROOT / "README.md"]
NO_RUN = "<!-- no-run -->"
MOST_LINES = 250

FENCE = re.compile(r"^( *)(`{3,})(\w*)(?: title=\"([^\"]+)\")?")
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


@dataclass(frozen=True, kw_only=True)
class Block:
    """A fenced block. `title`: the file that its text is."""

    line: int
    language: str
    title: str | None
    text: str
    run: bool

    @property
    def runs(self) -> bool:
        return self.language == "python" and self.run


def blocks(path: Path) -> Iterator[Block]:
    lines = path.read_text().splitlines()
    at = 0
    while at < len(lines):
        found = FENCE.match(lines[at])
        if found is None:
            at += 1
            continue
        pad, fence, language, title = found.groups()
        end = next(k for k in range(at + 1, len(lines)) if lines[k].strip() == fence)
        body = "\n".join(line.removeprefix(pad) for line in lines[at + 1 : end])
        before = next((line.strip() for line in reversed(lines[:at]) if line.strip()), "")
        yield Block(line=at + 1, language=language, title=title, text=body, run=before != NO_RUN)
        at = end + 1


def prose(path: Path) -> str:
    """A page without its fenced blocks and its inline code."""
    text = re.sub(r"^( *)(`{3,}).*?^ *\2$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"`[^`\n]*`", "", text)


def anchors(path: Path) -> set[str]:
    """Of the headings, as MkDocs and GitHub write them."""
    titles = re.findall(r"^#+ (.*)$", re.sub(r"^( *)(`{3,}).*?^ *\2$", "", path.read_text(), flags=re.M | re.S), flags=re.M)
    return {re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower()) for title in titles}


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


NEEDS = {"docs/howto/lightning.md": "lightning"}  # pages whose code needs a package that scrimp does not
RUNNABLE = [path for path in PAGES if any(block.runs for block in blocks(path))]


@pytest.mark.filterwarnings(  # of Lightning
    "ignore:The .* does not have many workers",
    "ignore:.isinstance.treespec, LeafSpec.. is deprecated",
)
@pytest.mark.parametrize("path", RUNNABLE, ids=name_of)
def test_the_code_of_a_page_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All Python blocks of a page in one namespace, in order, in a folder that has only the blocks with a title, as files."""
    if name_of(path) in NEEDS:
        pytest.importorskip(NEEDS[name_of(path)])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry, "_RULES", {**registry._RULES})  # a page may teach rules
    torch.manual_seed(0)
    for block in blocks(path):
        if block.title is not None:
            Path(block.title).write_text(block.text + "\n")
    terminated = signal.getsignal(signal.SIGTERM)
    page = ModuleType("a_page_of_the_docs")  # a module that can be imported: Dynamo looks names up in it
    monkeypatch.setitem(sys.modules, page.__name__, page)
    try:
        for block in blocks(path):
            if block.runs:
                code = "\n" * block.line + block.text  # so that a traceback names the line of the page
                exec(compile(code, str(path), "exec"), vars(page))
    finally:
        signal.signal(signal.SIGTERM, terminated)  # a page may show how to handle it
        # A DDP model that outlives its process group frees it under Python's lock, and waits for gloo's thread, which may be
        # waiting for that lock to free a tensor: so the page's objects go first.
        vars(page).clear()
        gc.collect()
        if dist.is_initialized():
            dist.destroy_process_group()


def test_few_blocks_are_not_run() -> None:
    every = [block.run for path in PAGES for block in blocks(path) if block.language == "python"]
    assert every.count(False) <= len(every) // 4, f"{every.count(False)} of {len(every)} Python blocks are not run"


@pytest.mark.parametrize("path", [path for path in PAGES if path != commands_page.PAGE], ids=name_of)
def test_a_page_is_short(path: Path) -> None:
    """But for the text of `--help`, which grows with every command."""
    assert len(path.read_text().splitlines()) <= MOST_LINES


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_links_resolve(path: Path) -> None:
    wrong = []
    for link in LINK.findall(prose(path)):
        target, _, anchor = link.partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        goal = (path.parent / target).resolve() if target else path
        if not goal.exists() or (anchor and goal.suffix == ".md" and not reaches(goal, anchor)):
            wrong.append(link)
    assert not wrong


def reaches(page: Path, anchor: str) -> bool:
    """A heading, or a name that mkdocstrings writes on the page."""
    return anchor in anchors(page) or f"::: {anchor}" in page.read_text()


@pytest.mark.parametrize("path", [path for path in PAGES if path != ROOT / "README.md"], ids=name_of)
def test_a_page_of_the_site_links_to_pages_of_the_site(path: Path) -> None:
    outside = [
        link
        for link in LINK.findall(prose(path))
        if not re.match(r"[a-z]+:|#", link) and DOCS not in (path.parent / link.partition("#")[0]).resolve().parents
    ]
    assert not outside


def test_the_reference_has_every_public_name() -> None:
    written = "\n".join(path.read_text() for path in sorted((DOCS / "reference").rglob("*.md")))
    assert not [name for name in scrimp.__all__ if f"::: scrimp.{name}\n" not in written]
    for module in (
        "scrimp.ext.ddp",
        "scrimp.ext.dtensor",
        "scrimp.ext.lightning",
        "scrimp.ext.ranks",
        "scrimp.rules",
        "scrimp.zoo",
    ):
        assert f"`{module}`" in written, module


def test_the_page_of_commands_is_their_help() -> None:
    assert commands_page.PAGE.read_text() == commands_page.page(), "run `python -m tests.docs.commands_page`"


@pytest.mark.parametrize("name", scrimp.__all__)
def test_a_public_name_has_an_example_that_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = getattr(scrimp, name)
    text = inspect.getdoc(found) or ""
    assert ">>>" in text, f"scrimp.{name} has no example"
    tests = doctest.DocTestFinder().find(found, name, globs={})
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    for test in tests:
        if test.examples:
            report: list[str] = []
            assert not runner.run(test, out=report.append).failed, "".join(report)
