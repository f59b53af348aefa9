"""What a step learns while it runs that makes its own recomputation wrong."""

from __future__ import annotations


class StepAgain(Exception):  # noqa: N818
    """Not an error: the engine undoes the step and runs it again. `unfit` is a layer that must not be recomputed."""

    def __init__(self, words: str, unfit: int | None = None) -> None:
        super().__init__(words)
        self.unfit = unfit
