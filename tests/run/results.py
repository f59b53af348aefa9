"""Results of cases in a file with one line of JSON each, so that a run that was stopped goes on. A result holds for the sources
that it was made with."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path

from tests.run.check import Verdict

ROOT = Path(__file__).parents[2]
SOURCES = ("scrimp", "tests/run", "tests/rank_jobs/planned")


def digest_of_sources() -> str:
    found = hashlib.sha256()
    for path in sorted(path for folder in SOURCES for pattern in ("*.py", "*.c") for path in (ROOT / folder).rglob(pattern)):
        found.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    return found.hexdigest()[:16]


class Results:
    def __init__(self, path: Path, digest: str) -> None:
        self.path, self.digest = path, digest
        self.found: dict[str, Verdict] = {}
        for line in path.read_text().splitlines() if path.exists() else ():
            try:
                row = json.loads(line)
            except ValueError:
                continue  # the run ended while it wrote this line
            case = row.pop("case")
            if row.pop("sources") == digest:
                self.found[case] = Verdict(**{key: tuple(each) if isinstance(each, list) else each for key, each in row.items()})

    def add(self, case: str, verdict: Verdict) -> None:
        self.found[case] = verdict
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps({"case": case, "sources": self.digest, **asdict(verdict)}) + "\n")
