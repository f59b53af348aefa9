"""The map of the code, docs/design.md: every file and function that it names is there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
MAP = (ROOT / "docs" / "design.md").read_text()


def file_of(path: str) -> Path:
    return ROOT / path if path.startswith(("scrimp/", "tests/", "bench/")) else ROOT / "scrimp" / path


def test_files_and_functions_of_the_map_exist() -> None:
    paths = re.findall(r"`([\w/]+\.py)`", MAP)
    assert len(paths) > 40
    assert not [path for path in paths if not file_of(path).exists()]
    hops = [(path, name) for path, names in re.findall(r"`([\w/]+\.py)`\s+\(((?:`[\w.]+`(?:, )?)+)\)", MAP) for name in
            re.findall(r"`([\w.]+)`", names)]  # fmt: skip
    rows = re.findall(r"\| `([\w/]+\.py)` \| `([\w.]+)` \|", MAP)
    assert len(hops) > 20
    for path, name in [*hops, *rows]:
        source = file_of(path).read_text()
        assert re.search(rf"\b(?:def|class) {name.rsplit('.', 1)[-1]}\b", source), f"{path} has no {name}"
