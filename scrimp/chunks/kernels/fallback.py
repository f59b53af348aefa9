"""Loads one of scrimp's own kernels, or returns the reason why not: training continues with torch's kernels in any case."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from scrimp.chunks.kernels.build import NoKernelError

Kernel = TypeVar("Kernel")


def kernel_or_reason(switch: str, make: Callable[[], Kernel | str]) -> Kernel | str:
    """The result of `make`, or the reason of its failure. The environment variable `switch`=0 disables the kernel."""
    if os.environ.get(switch) == "0":
        return f"{switch} is 0"
    try:
        return make()
    except NoKernelError as error:
        return str(error)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


@contextmanager
def triton_at_hand() -> Iterator[None]:
    """Silences Triton's own warnings on import, and turns a missing Triton into `NoKernelError`."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except ImportError as error:
        raise NoKernelError(f"no Triton: {error}") from error
