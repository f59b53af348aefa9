"""Writes examples/text.txt, the text that the examples train on, from the project's own documentation."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("start", "howto", "explanation")
NBYTES = 192 << 10


def text() -> str:
    """Prose and code of the pages, without tables and links."""
    pages = [path for folder in FOLDERS for path in sorted((ROOT / "docs" / folder).glob("*.md"))]
    found = []
    for page in pages:
        lines = [line for line in page.read_text(encoding="utf-8").splitlines() if not line.startswith(("|", ":::", "!["))]
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", "\n".join(lines))
        found.append(re.sub(r"\n{3,}", "\n\n", plain.encode("ascii", "ignore").decode()).strip())
    return "\n\n".join(found)[:NBYTES] + "\n"


if __name__ == "__main__":
    (Path(__file__).parent / "text.txt").write_text(text(), encoding="utf-8")
