"""For the API pages: `>>>` examples in docstrings become code blocks. Read by mkdocstrings (see mkdocs.yml)."""

from __future__ import annotations

from typing import Any

import griffe

PROMPT = ">>>"


class Examples(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None and PROMPT in obj.docstring.value:
            obj.docstring.value = fenced(obj.docstring.value)


def fenced(text: str) -> str:
    """The text with a fence around every paragraph that begins with a prompt."""
    paragraphs = text.split("\n\n")
    return "\n\n".join(f"```pycon\n{part}\n```" if part.lstrip().startswith(PROMPT) else part for part in paragraphs)
