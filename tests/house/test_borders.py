"""The borders of the house: faces that are declared, no import past a face, folders that fit on a screen, tests where they are
looked for."""

from __future__ import annotations

import ast
import importlib
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = sorted(path.parent.name for path in (ROOT / "scrimp").glob("*/__init__.py"))
OPEN = {"ext", "zoo"}  # whose modules without an underscore are public themselves
MOST_FILES = 16


def imports(source: str) -> Iterator[tuple[str, list[str]]]:
    """Modules that a text imports from, and the names."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "a relative import"
            yield node.module or "", [alias.name for alias in node.names]
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, []


def beyond_a_face(source: str, own: str | None) -> list[str]:
    """Imports of an inner module of a package, or of a name that its face does not declare; `own` is the text's own package."""
    found = []
    for module, names in imports(source):
        steps = module.split(".")
        if steps[0] != "scrimp" or len(steps) < 2 or steps[1] == own or steps[1] not in PACKAGES:
            continue
        if len(steps) > 2 and not (steps[1] in OPEN and not steps[2].startswith("_")):
            found.append(module)
        elif len(steps) == 2 and steps[1] not in OPEN:
            face = importlib.import_module(module).__all__
            found += [f"{module}.{name}" for name in names if name not in face]
    return found


def package_of(path: Path) -> str | None:
    parts = path.relative_to(ROOT).parts
    return parts[1] if parts[0] == "scrimp" and len(parts) > 2 else None


@pytest.mark.parametrize("folder", ["scrimp", "bench"])
def test_nobody_imports_past_a_face(folder: str) -> None:
    files = sorted((ROOT / folder).rglob("*.py"))
    found = {str(path.relative_to(ROOT)): beyond_a_face(path.read_text(), package_of(path)) for path in files}
    assert not {path: past for path, past in found.items() if past}


def test_an_import_past_a_face_would_be_seen() -> None:
    wrong = "from scrimp.chunks.store.store import Store\nfrom scrimp.chunks import nothing_like_it\nimport scrimp.move.run\n"
    assert beyond_a_face(wrong, None) == ["scrimp.chunks.store.store", "scrimp.chunks.nothing_like_it", "scrimp.move.run"]
    assert beyond_a_face(wrong, "chunks") == ["scrimp.move.run"]
    assert not beyond_a_face("from scrimp.chunks import Store\nfrom scrimp.ext.ranks import pool\n", None)


@pytest.mark.parametrize("package", [name for name in PACKAGES if name != "ext"])
def test_a_face_declares_what_it_has(package: str) -> None:
    face = importlib.import_module(f"scrimp.{package}")
    assert face.__all__
    assert len({*face.__all__}) == len(face.__all__)
    for name in face.__all__:
        assert getattr(face, name) is not None, name
    page = face.__doc__ or ""
    if package != "zoo":
        assert "In:" in page, f"scrimp/{package}/__init__.py does not say what comes in"
        assert "Out:" in page, f"scrimp/{package}/__init__.py does not say what goes out"
    files = {path.name for path in Path(str(face.__file__)).parent.iterdir() if path.suffix == ".py" or path.is_dir()}
    named = [name for name in files - {"__init__.py", "__pycache__"} if (name if name.endswith(".py") else f"{name}/") in page]
    if package != "zoo":
        assert {*named} == files - {"__init__.py", "__pycache__"}, "files that the entry page does not name"


@pytest.mark.parametrize("folder", ["scrimp", "tests", "bench"])
def test_no_folder_has_more_files_than_fit_on_a_screen(folder: str) -> None:
    counts = Counter(path.parent for path in (ROOT / folder).rglob("*.py") if path.name not in {"__init__.py", "__main__.py"})
    assert not {str(path.relative_to(ROOT)): count for path, count in counts.items() if count > MOST_FILES}


def test_every_module_has_tests_where_they_are_looked_for() -> None:
    """In the folder that mirrors the module's, or that mirrors its package; otherwise its package's page says where."""
    missing = []
    for path in sorted((ROOT / "scrimp").rglob("*.py")):
        inside = path.relative_to(ROOT / "scrimp")
        if path.name == "__init__.py" or len(inside.parts) == 1:
            continue
        if any(sorted((ROOT / "tests" / parent).glob("test_*.py")) for parent in inside.parents if parent != Path()):
            continue
        page = (ROOT / "scrimp" / inside.parts[0] / "__init__.py").read_text()
        said = dict(re.findall(r"^Tests of (\S+): (\S+)$", page, re.MULTILINE))
        where = said.get(inside.parent.name) or said.get(path.stem)
        if where is None or not (ROOT / where).exists():
            missing.append(str(inside))
    assert not missing


def test_every_folder_of_modules_is_a_package_with_a_page() -> None:
    """A folder without an `__init__.py` can be imported all the same, but no tool finds it: `.gitignore` once hid one."""
    folders = {path.parent for path in (ROOT / "scrimp").rglob("*.py")}
    without = [str(folder.relative_to(ROOT)) for folder in sorted(folders) if not (folder / "__init__.py").exists()]
    assert not without
    for folder in sorted(folders):
        assert ast.get_docstring(ast.parse((folder / "__init__.py").read_text())), f"{folder} has no page"
