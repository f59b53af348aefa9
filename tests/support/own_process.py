"""A test that needs a process of its own, among others that share one.

torch maps a GPU's memory 20 MiB at a time. Where other tests left parts of such pieces, its allocator may pass a cap by less
than that. A test of an exact cap therefore runs in a fresh process, by pytest, whatever process collected it.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from collections.abc import Callable
from typing import ParamSpec

ALONE = "SCRIMP_TEST_ALONE"
SECONDS = 600

Given = ParamSpec("Given")


def in_its_own_process(test: Callable[Given, None]) -> Callable[Given, None]:
    """The test, run by another pytest; a test that is skipped there has not passed."""

    @functools.wraps(test)
    def run(*args: Given.args, **kwargs: Given.kwargs) -> None:
        if os.environ.get(ALONE) == "1":
            test(*args, **kwargs)
            return
        name = os.environ["PYTEST_CURRENT_TEST"].rsplit(" ", 1)[0]
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider", name],
            env={**os.environ, ALONE: "1"}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=SECONDS,
        )  # fmt: skip
        print(done.stdout)
        passed = done.returncode == 0 and re.search(r"^=+ 1 passed in ", done.stdout, re.MULTILINE)
        assert passed, f"{name} in a process of its own ended with {done.returncode}:\n{done.stdout}"

    return run
