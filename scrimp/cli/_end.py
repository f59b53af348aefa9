"""Error handling of the commands: one message, an exit code, and no traceback.

Exit codes: 0, done. 1, the work failed (a `ScrimpError`, or the machine ran out of memory or disk), or a check is negative. 2,
wrong usage. 70, a bug in scrimp. 130, Ctrl-C. With SCRIMP_DEBUG=1 in the environment the traceback comes before the message.
"""

from __future__ import annotations

import errno
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from scrimp.errors import ScrimpError

FAILED, USAGE, BUG, INTERRUPTED = 1, 2, 70, 130
DEBUG = "SCRIMP_DEBUG"


class UsageError(ScrimpError):
    """Wrong usage: exit code 2."""


@contextmanager
def typed() -> Iterator[None]:
    """Wraps the checks of arguments, before the work begins: an error inside is a usage error."""
    try:
        yield
    except ScrimpError as error:
        raise UsageError(str(error)) from error


@contextmanager
def ending() -> Iterator[None]:
    """Wraps a command. `SystemExit`, and the exceptions of the command-line parser, pass."""
    try:
        yield
    except KeyboardInterrupt as error:
        _end("interrupted", INTERRUPTED, error)
    except ScrimpError as error:
        _end(f"error: {error}", USAGE if isinstance(error, UsageError) else FAILED, error)
    except MemoryError as error:
        _end("error: this machine ran out of memory; use smaller sizes, or a machine with more", FAILED, error)
    except OSError as error:
        if error.errno == errno.EPIPE:  # the reader of the output has closed it: the parser ends such a command silently
            raise
        _end(f"error: {error}", FAILED, error)
    except Exception as error:
        if _of_the_parser(error):
            raise
        text = " ".join(f"{type(error).__name__}: {error}".split())
        how = f"run it again with {DEBUG}=1 in the environment to see the traceback, and report both"
        _end(f"this is a bug in scrimp, not in what you typed: {text}; {how}", BUG, error)


def _of_the_parser(error: Exception) -> bool:
    """`typer.Exit`, usage errors and others, which it prints itself. Typer brings its own copy of click in some versions."""
    return any(each.__module__.split(".")[0] in ("click", "typer") for each in type(error).__mro__)


def _end(message: str, code: int, error: BaseException) -> None:
    if os.environ.get(DEBUG, "") not in ("", "0"):
        traceback.print_exception(error)
    encoding = getattr(sys.stderr, "encoding", None) or "utf-8"
    line = message.encode(encoding, "replace").decode(encoding)
    red = code != INTERRUPTED and sys.stderr.isatty() and "NO_COLOR" not in os.environ
    print(f"\033[31m{line}\033[0m" if red else line, file=sys.stderr)
    raise SystemExit(code) from None
