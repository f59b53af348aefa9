"""Builds a C kernel's library at first use with the machine's own compiler, and keeps it in the user's cache.

The file's name is a hash of everything that goes into it. A rename puts it in place, so several processes may build it at once;
those of one machine wait for the first.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from scrimp._cache import cache_folder

SOURCE = Path(__file__).with_name("host_update.c")
INCLUDE = re.compile(r'^#include "(.+)"$', re.MULTILINE)
FLAGS = ("-std=gnu11", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fPIC", "-shared", "-pthread")
MACHINES = {"x86_64": "x86-64", "AMD64": "x86-64", "aarch64": "aarch64"}  # by Python's names
SECONDS = 120


class NoKernelError(Exception):
    """Says why a kernel is not available."""


def compiler() -> list[str]:
    """The compiler command: CC, or the first that is found."""
    given = shlex.split(os.environ.get("CC", ""))
    for command in [given] if given else [["cc"], ["gcc"], ["clang"]]:
        if found := shutil.which(command[0]):
            return [found, *command[1:]]
    raise NoKernelError(f"no C compiler: CC is {given[0]}, which is not here" if given else "no C compiler (cc, gcc, clang)")


def load_library(source: Path = SOURCE) -> tuple[ctypes.CDLL, str]:
    """The loaded library, and the compiler's version line."""
    if platform.machine() not in MACHINES:
        raise NoKernelError(f"it is for {' and '.join(dict.fromkeys(MACHINES.values()))}, this is {platform.machine()}")
    command = compiler()
    version = _run([*command, "--version"])
    parts = (*_texts(source), version, " ".join((*command, *FLAGS)), platform.machine())
    name = f"native-{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:24]}.so"
    in_words = (version.strip().splitlines() or [shlex.join(command)])[0]
    try:
        return _from(cache_folder(), name, command, source), in_words
    except (OSError, RuntimeError):  # the cache is not writable, has no home directory, or is mounted noexec
        pass
    with tempfile.TemporaryDirectory(prefix="scrimp-") as folder:  # once loaded, the file is not needed
        return _from(Path(folder), name, command, source), in_words


def _texts(source: Path) -> list[str]:
    """Texts of the source and of every file that it includes."""
    found: dict[Path, str] = {}
    waiting = [source.resolve()]
    while waiting:
        path = waiting.pop()
        if path not in found:
            found[path] = path.read_text()
            waiting += [(path.parent / name).resolve() for name in INCLUDE.findall(found[path])]
    return [found[path] for path in sorted(found)]


def _from(folder: Path, name: str, command: list[str], source: Path) -> ctypes.CDLL:
    path = folder / name
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with _alone(folder):
            if not path.exists():  # another process may have built it meanwhile
                _build(path, command, source)
    try:
        return ctypes.CDLL(str(path))
    except OSError:
        path.unlink(missing_ok=True)
        raise


def _build(path: Path, command: list[str], source: Path) -> None:
    handle, fresh = tempfile.mkstemp(dir=path.parent, suffix=".so")
    os.close(handle)
    try:
        _run([*command, *FLAGS, str(source), "-o", fresh, "-lm"])
        os.replace(fresh, path)
    finally:
        Path(fresh).unlink(missing_ok=True)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One process at a time: the ranks of a machine start together, and one build takes seconds. Where the folder cannot be
    locked, each builds."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(ImportError, OSError):
            import fcntl  # not on every system

            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)  # which unlocks


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=SECONDS, env={**os.environ, "LC_ALL": "C"}
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoKernelError(f"{Path(command[0]).name} does not run: {error}") from error
    if done.returncode:
        said = " ".join(done.stderr.split())[:300] or "nothing"
        raise NoKernelError(f"{Path(command[0]).name} ended with {done.returncode} and said: {said}")
    return done.stdout
