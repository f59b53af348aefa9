"""Graphs in the user's cache: what is not exactly what was written counts as missing, and the folder stays small."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import pytest

from scrimp import zoo
from scrimp.capture import Graph, capture, load_graph, save_graph
from scrimp.capture.cache import graph_files

KEY, OTHER = "a" * 64, "b" * 64


@cache
def graph() -> Graph:
    return capture(zoo.build("gpt-tiny"), zoo.example_batch("gpt-tiny"))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(graph_files.SWITCH, raising=False)
    return tmp_path / "scrimp"


def only(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


def test_a_graph_comes_back(folder: Path) -> None:
    assert load_graph(KEY) is None
    save_graph(KEY, graph())
    assert load_graph(KEY) == graph()
    assert load_graph(OTHER) is None
    assert KEY in only(folder).name


def test_a_damaged_file_counts_as_missing(folder: Path) -> None:
    save_graph(KEY, graph())
    path, whole = only(folder), only(folder).read_bytes()
    wrong = [
        b"",
        b"\n",
        whole[:-1],
        whole[: len(whole) // 2],
        whole + b" ",
        whole.replace(b"aten.mm", b"aten.mv", 1),
        b"\xff" * 100,
    ]
    for text in wrong:
        path.write_bytes(text)
        assert load_graph(KEY) is None
    save_graph(KEY, graph())
    assert load_graph(KEY) == graph()


def test_a_file_of_another_key_counts_as_missing(folder: Path) -> None:
    save_graph(KEY, graph())
    os.rename(only(folder), folder / only(folder).name.replace(KEY, OTHER))
    assert load_graph(OTHER) is None


def test_a_file_of_another_format_counts_as_missing(folder: Path) -> None:
    save_graph(KEY, graph())
    text = only(folder).read_bytes().partition(b"\n")[2].replace(b'"version": 2', b'"version": 1', 1)
    only(folder).write_bytes(graph_files._head(KEY, text) + b"\n" + text)
    assert load_graph(KEY) is None


def test_the_least_recently_used_go_first(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_files, "MOST_FILES", 3)
    keys = [f"{k:064x}" for k in range(4)]
    for k, key in enumerate(keys[:3]):
        save_graph(key, graph())
        os.utime(folder / f"graph-{key}.json", (k, k))
    assert load_graph(keys[0]) is not None  # now the most recently used
    save_graph(keys[3], graph())
    assert [load_graph(key) is not None for key in keys] == [True, False, True, True]


def test_the_folder_has_a_most_of_bytes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_graph(KEY, graph())
    monkeypatch.setattr(graph_files, "MOST_NBYTES", only(folder).stat().st_size)
    save_graph(OTHER, graph())
    assert load_graph(KEY) is None
    assert load_graph(OTHER) == graph()


def test_what_a_killed_process_left_is_removed_later(folder: Path) -> None:
    folder.mkdir()
    (folder / "graph-old.new").write_text("half")
    os.utime(folder / "graph-old.new", (0, 0))
    (folder / "graph-now.new").write_text("half")
    (folder / "native-kernel.so").write_text("another file")
    save_graph(KEY, graph())
    assert {path.name for path in folder.iterdir()} == {"graph-now.new", "native-kernel.so", f"graph-{KEY}.json"}


def test_it_can_be_turned_off(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_graph(KEY, graph())
    monkeypatch.setenv(graph_files.SWITCH, "0")
    assert load_graph(KEY) is None
    save_graph(OTHER, graph())
    monkeypatch.delenv(graph_files.SWITCH)
    assert load_graph(OTHER) is None
    assert load_graph(KEY) == graph()


def test_a_folder_that_cannot_be_written_is_no_error(folder: Path) -> None:
    folder.write_text("a file where the folder should be")
    save_graph(KEY, graph())
    assert load_graph(KEY) is None
