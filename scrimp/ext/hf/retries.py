"""Numbers that a loss function counts on its trainer, counted once although the engine may run the function several times.

TRL's trainers append entropy, accuracy and tokens to lists and counters of the trainer in `compute_loss`. If an attempt did not
fit the budget, the engine runs the function again, and everything would be counted twice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

NUMBERS = (int, float, str, type(None))  # bool is an int
MOST_KEYS, DEEPEST = 1000, 3


class Counted:
    """The numbers, lists and dicts among an object's attributes, as they are now. Lists are appended to, so only their lengths
    are kept."""

    def __init__(self, holder: Any) -> None:
        self._holder, self._attempts = holder, 0
        self._numbers = {name: value for name, value in vars(holder).items() if isinstance(value, NUMBERS)}
        self._lists: list[tuple[list[Any], int]] = []
        self._dicts: list[tuple[dict[Any, Any], dict[Any, Any]]] = []
        for value in vars(holder).values():
            self._record(value, 0)

    def _record(self, value: Any, depth: int) -> None:
        if isinstance(value, list):
            self._lists.append((value, len(value)))
        elif isinstance(value, dict) and len(value) <= MOST_KEYS and depth < DEEPEST:
            self._dicts.append((value, dict(value)))
            for inner in value.values():
                self._record(inner, depth + 1)

    def counting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, before which everything is put back from its second call on."""

        def counted(*args: Any, **kwargs: Any) -> Any:
            self._attempts += 1
            if self._attempts > 1:
                self._back()
            return function(*args, **kwargs)

        return counted

    def _back(self) -> None:
        vars(self._holder).update(self._numbers)
        for found, before in self._dicts:
            found.clear()
            found.update(before)
        for items, length in self._lists:
            del items[length:]
