"""Folders of one run's checkpoints: `step-00000100`, `step-00000200`. Which is the newest complete one, and removing old ones.

A folder counts as complete if it has a manifest, because a save writes the manifest last and a rename gives the folder its name.
`prune` deletes the manifest first, so that a folder of which only some files are gone does not count.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from scrimp._warnings import warn
from scrimp.checkpoint._manifest import NAME
from scrimp.checkpoint._save import ASIDE, UNFINISHED, being_written
from scrimp.errors import CheckpointError

FORM = re.compile(r"step-(\d{8,})")


def step_folder(folder: str | Path, step: int) -> Path:
    """The folder of a step's checkpoint, below the folder of all checkpoints of a run.

    >>> from scrimp import checkpoint
    >>> print(checkpoint.step_folder("run/checkpoints", 1200))
    run/checkpoints/step-00001200
    """
    if step < 0:
        raise CheckpointError(f"a step is a number from 0 on, not {step}")
    return Path(folder) / f"step-{step:08d}"


def latest(folder: str | Path) -> Path | None:
    """The newest complete checkpoint `step-*` below a folder; None if there is none, or no such folder.

    If a save over an older checkpoint of the same step was killed between its two renames, this is the older one, under the name
    `step-*.previous`.

    >>> from scrimp import checkpoint
    >>> print(checkpoint.latest("no/such/folder"))
    None
    """
    return max(_complete(Path(folder)).items(), default=(0, None))[1]


def prune(folder: str | Path, keep: int) -> list[Path]:
    """Delete all complete checkpoints `step-*` below a folder but the newest `keep`, and what killed saves left. Returns what
    was deleted. With several ranks only rank 0 calls this.

    The newest complete checkpoint always stays. What this process is writing stays too. A folder that cannot be deleted stays,
    with a warning, and the next call tries again.

    >>> import tempfile
    >>> from scrimp import checkpoint
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     print(checkpoint.prune(folder, keep=3))
    []
    """
    if keep < 1:
        raise CheckpointError(f"keep is {keep}: prune keeps the newest complete checkpoint, so keep is at least 1")
    where = Path(folder)
    complete = _complete(where)
    old = [complete[step] for step in sorted(complete)[:-keep]]
    removed = []
    for path in [*old, *_leftovers(where, set(complete.values()))]:
        try:
            (path / NAME).unlink(missing_ok=True)
            shutil.rmtree(path)
        except OSError as error:
            warn(f"{path} could not be deleted: {error}; it stays, and no longer counts as a checkpoint")
            continue
        removed.append(path)
    return removed


def _complete(folder: Path) -> dict[int, Path]:
    """Complete checkpoints by step."""
    found = {}
    for path in _entries(folder):
        match = FORM.fullmatch(path.name.removesuffix(ASIDE))
        if match is None or not (path / NAME).is_file():
            continue
        if path.name.endswith(ASIDE) and (folder / match[0] / NAME).is_file():
            continue  # a leftover: the checkpoint that replaced it is complete
        found[int(match[1])] = path
    return found


def _leftovers(folder: Path, complete: set[Path]) -> list[Path]:
    """Folders that killed saves and failed deletions left."""
    found = []
    for path in _entries(folder):
        bare = path.name.removesuffix(ASIDE).removesuffix(UNFINISHED)
        ours = all(other.name == NAME or other.match("rank-*.safetensors") for other in path.iterdir())
        if FORM.fullmatch(bare) and path not in complete and ours and not being_written(path):
            found.append(path)
    return found


def _entries(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(Path(entry.path) for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False))
