"""The words of the house: terms that only this project used are gone from code, errors, help and documentation.

`PHRASES` says what each was, and what the field says. Ordinary uses of a word are exempt: Adam's moments, a home directory.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("scrimp", "docs")
FILES = ("README.md", "CONTRIBUTING.md", "Makefile")
GENERATED = ("docs/results/raw",)

PHRASES = {
    r"\bmoments?\b": "schedule step (Adam's moments are exempt)",
    r"\bhomes?\b": "placement, or tier",
    r"\bpass(?:es|ed|ing)? through the device\b|\bgo(?:es)? through the device\b": "streamed through the device",
    r"\bpark(?:s|ed|ing)?\b": "offloaded",
    r"\bjudg(?:e|es|ed|ing)\b": "checked; after the global gradient check",
    r"\bland(?:s|ed|ing)?\b": "arrive",
    r"\bwatched\b|\blook(?:s|ed)? at\b": "metered; inspected; compared",
    r"\bbeside (?:the |what |a |each |every |its )?(?:steps?|forward|backward|next|updates?|comes)\b": "overlapped with",
    r"\b(?:choose|chosen|chose|kept|taken|told) apart\b": "separately",
    r"\bkept back\b|\bwhat waits\b": "residual (error feedback)",
    r"(?<![/.\w])(?:questions?|answer(?:s|ed)?)\b(?!/)": "request, solver call, result",
    r"\b(?:is|was|be|are|were) asked\b|\bas asked for\b": "requested",
    r"\bchose each for itself\b|\bgap\b[^.\n]{0,20}\bat most\b": "optimality gap; lower bound with free per-layer choices",
    r"\bother mathematics\b": "changes numerical results",
    r"\bstand[- ]ins?\b|\bseats?\b": "emptied parameter; fake tensor",
    r"\btak(?:es|en|ing|e) (?:the model |a model |it )?over\b": "adopt",
}
ADAM = re.compile(r"adam|optimizer|momentum|\bstates?\b|8.bit|int8|coded|variance|squares|first and second|both moments", re.I)
EXEMPT = {
    r"\bmoments?\b": lambda line: bool(ADAM.search(line)),
    r"\bhomes?\b": lambda line: bool(re.search(r"Path\.home|HOME|home directory|homepage", line)),
}
# Files about Adam's moments, whatever a single line says.
OF_ADAM = (
    "scrimp/chunks/tables/",
    "scrimp/chunks/kernels/",
    "scrimp/chunks/update/",
    "scrimp/exchange/",
    "scrimp/engine/gradients/",
)


def files() -> list[Path]:
    found = [path for folder in FOLDERS for kind in ("*.py", "*.md", "*.c") for path in sorted((ROOT / folder).rglob(kind))]
    named = [*found, *(ROOT / name for name in FILES)]
    return [path for path in named if not str(path.relative_to(ROOT)).startswith(GENERATED)]


def uses(phrase: str, path: Path) -> list[str]:
    where = str(path.relative_to(ROOT))
    exempt = EXEMPT.get(phrase, lambda line: False)
    if phrase == r"\bmoments?\b" and where.startswith(OF_ADAM):
        return []
    found = []
    lines = path.read_text().splitlines()
    for number, line in enumerate(lines, 1):
        near = " ".join(lines[max(0, number - 2) : number + 1])
        if re.search(phrase, line, re.IGNORECASE) and not exempt(near):
            found.append(f"{where}:{number}: {line.strip()[:110]}")
    return found


@pytest.mark.parametrize("phrase", PHRASES)
def test_a_word_of_our_own_is_gone(phrase: str) -> None:
    found = [use for path in files() for use in uses(phrase, path)]
    assert not found, f"say {PHRASES[phrase]}:\n" + "\n".join(found)
