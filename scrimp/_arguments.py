"""Arguments that `Engine` and `plan` share: one word and one form for each idea, and old words that name the new one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any, TypeVar

from scrimp.errors import ScrimpError

KEEP, RECOMPUTE, OFFLOAD = "keep", "recompute", "offload"
WAYS = (KEEP, RECOMPUTE, OFFLOAD)

Function = TypeVar("Function", bound=Callable[..., Any])


def activations_of(given: str | Iterable[str], error: type[ScrimpError]) -> tuple[str, ...]:
    """What may become of activations, in a fixed order. `given`: "auto" for all of them, names such as "keep,recompute", or a
    set of names."""
    if isinstance(given, str):
        names = {*WAYS} if given == "auto" else {name.strip() for name in given.split(",")}
    else:
        try:
            names = {*given}
        except TypeError:
            names = {given}  # type: ignore[arg-type]
    if not names or not names <= {*WAYS}:
        raise error(f"activations={given!r}: give 'auto', or some of {', '.join(WAYS)}, such as {{'keep', 'recompute'}}")
    return tuple(name for name in WAYS if name in names)


def renamed(owner: str, error: type[ScrimpError], **names: str) -> Callable[[Function], Function]:
    """A decorator: an argument by its old name raises, and the error names the new one."""

    def decorate(function: Function) -> Function:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            for old, new in names.items():
                if old in kwargs:
                    raise error(f"{owner} has no argument '{old}' any more: write {new}")
            return function(*args, **kwargs)

        return call  # type: ignore[return-value]

    return decorate
