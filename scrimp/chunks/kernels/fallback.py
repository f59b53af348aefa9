"""A kernel of our own, or in words why there is none: training goes on without it, whatever it was."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from scrimp.chunks.kernels.build import NoKernelError

Kernel = TypeVar("Kernel")


def kernel_or_reason(switch: str, make: Callable[[], Kernel | str]) -> Kernel | str:
    """What `make` gives, unless the environment's `switch` is 0."""
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
    """It warns of itself, which is nobody's concern; and where it is not, there is no kernel."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except ImportError as error:
        raise NoKernelError(f"no Triton: {error}") from error
