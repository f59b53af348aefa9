"""Folders of one run's checkpoints: the newest complete one is found, old ones go, leftovers go, nothing complete is lost."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from scrimp.checkpoint import _save, latest, prune, step_folder
from scrimp.errors import CheckpointError


def made(folder: Path, step: int, suffix: str = "", *, complete: bool = True) -> Path:
    path = step_folder(folder, step)
    path = path.with_name(path.name + suffix)
    path.mkdir(parents=True)
    (path / "rank-0.safetensors").write_bytes(b"data")
    if complete:
        (path / "manifest.json").write_text("{}")
    return path


def test_the_newest_complete_one_counts(tmp_path: Path) -> None:
    assert latest(tmp_path) is None
    made(tmp_path, 5)
    made(tmp_path, 100_000_000)  # nine digits
    made(tmp_path, 200_000_000, complete=False)
    made(tmp_path, 300_000_000, ".unfinished")
    (tmp_path / "step-x").mkdir()
    assert latest(tmp_path) == tmp_path / "step-100000000"


def test_an_old_one_that_was_moved_aside_counts_until_it_is_replaced(tmp_path: Path) -> None:
    aside = made(tmp_path, 5, ".previous")
    assert latest(tmp_path) == aside
    prune(tmp_path, keep=1)
    assert latest(tmp_path) == aside
    new = made(tmp_path, 5)
    assert latest(tmp_path) == new
    assert prune(tmp_path, keep=1) == [aside]
    assert latest(tmp_path) == new


def test_pruning_keeps_the_newest_and_removes_leftovers(tmp_path: Path) -> None:
    paths = [made(tmp_path, step) for step in (10, 20, 30, 40)]
    left = [made(tmp_path, 25, complete=False), made(tmp_path, 50, ".unfinished")]
    mine = tmp_path / "step-00000060"  # looks like one, but has a user's file
    mine.mkdir()
    (mine / "notes.txt").write_text("mine")
    assert set(prune(tmp_path, keep=2)) == {*paths[:2], *left}
    assert sorted(path.name for path in tmp_path.iterdir()) == [*(path.name for path in paths[2:]), mine.name]
    assert prune(tmp_path, keep=2) == []
    assert prune(tmp_path / "no-such-folder", keep=2) == []


def test_pruning_keeps_what_this_process_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work = made(tmp_path, 50, ".unfinished", complete=False)
    monkeypatch.setattr(_save, "_WRITING", {work})
    assert prune(tmp_path, keep=1) == []
    monkeypatch.setattr(_save, "_WRITING", set())
    assert prune(tmp_path, keep=1) == [work]


def test_a_failed_deletion_warns_and_leaves_no_checkpoint_that_seems_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (10, 20, 30):
        made(tmp_path, step)
    really = shutil.rmtree

    def fails(path: Path) -> None:
        if path.name == "step-00000010":
            raise OSError("device busy")
        really(path)

    monkeypatch.setattr(shutil, "rmtree", fails)
    with pytest.warns(UserWarning, match=r"step-00000010 could not be deleted: device busy; it stays, and no longer counts"):
        assert [path.name for path in prune(tmp_path, keep=1)] == ["step-00000020"]
    assert not (tmp_path / "step-00000010" / "manifest.json").exists()
    monkeypatch.undo()
    assert [path.name for path in prune(tmp_path, keep=1)] == ["step-00000010"]


def test_what_makes_no_sense_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="keep is 0: prune keeps the newest complete checkpoint"):
        prune(tmp_path, keep=0)
    with pytest.raises(CheckpointError, match="a step is a number from 0 on, not -1"):
        step_folder(tmp_path, -1)
