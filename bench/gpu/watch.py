"""A process under watch: ended with all its children when it takes too long, or before the host's memory runs out.

Pinned memory does not always show in a process's own figures, so the host's MemAvailable is what is watched.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from scrimp.engine import available_host_nbytes

POLL_S = 0.25
SPARE_NBYTES = 4 << 30  # less than this left on the host: better to end one process than to leave the choice to the system


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """`ended`: why the process was ended, if it did not end by itself. `host_nbytes`: by how much the host's available
    memory fell at most."""

    stdout: str
    stderr: str
    returncode: int
    ended: str | None
    seconds: float
    host_nbytes: int


def watched(
    command: Sequence[str],
    *,
    seconds: float,
    env: Mapping[str, str] | None = None,
    available: Callable[[], int] = available_host_nbytes,
) -> Outcome:
    """`available`: where the host's memory is asked for."""
    before = least = available()
    start = time.monotonic()
    ended = None
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(command, stdout=out, stderr=err, env=env, start_new_session=True)
        with suppress(OSError):  # should the system have to choose after all
            Path(f"/proc/{process.pid}/oom_score_adj").write_text("1000")
        try:
            while process.poll() is None and ended is None:
                least = min(least, available())
                if least < SPARE_NBYTES:
                    ended = "host memory ran out"
                elif time.monotonic() - start > seconds:
                    ended = f"not done in {seconds:.0f} s"
                else:
                    with suppress(subprocess.TimeoutExpired):
                        process.wait(POLL_S)
        finally:
            with suppress(ProcessLookupError):  # its children too, whether it ended or not
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for file in (out, err):
            file.seek(0)
        return Outcome(
            stdout=out.read(),
            stderr=err.read(),
            returncode=process.returncode,
            ended=ended,
            seconds=time.monotonic() - start,
            host_nbytes=before - least,
        )
