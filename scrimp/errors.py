"""The one family of errors. A message says what, where, the numbers on both sides, and what to try."""

from __future__ import annotations

from collections.abc import Mapping


class ScrimpError(Exception):
    """Base of every error scrimp raises on purpose."""


class LayoutError(ScrimpError):
    """A mesh, a layout or a shape that does not make sense, alone or together."""


class MoveError(ScrimpError):
    """A move between layouts that cannot be made, or that failed while running."""


class CaptureError(ScrimpError):
    """A model whose training cannot be told as one graph, or a batch that does not belong to it."""


class PlanError(ScrimpError):
    """A question to the planner that does not make sense, or that has no answer."""


class PlanWarning(UserWarning):
    """A plan that could be better: an operator that every device runs whole."""


class FitError(ScrimpError):
    """It does not fit: how many bytes, where, when, and what would help. `least_nbytes`: the least budget that works, where it
    is known. `tier`: of "device", "host" and "disk" the one whose budget that is."""

    def __init__(self, *args: object, least_nbytes: int | None = None, tier: str | None = None) -> None:
        super().__init__(*args)
        self.least_nbytes = least_nbytes
        self.tier = tier

    def bare(self) -> FitError:
        """The same error without its traceback and its cause, whose frames hold the tensors that did not fit."""
        return FitError(*self.args, least_nbytes=self.least_nbytes, tier=self.tier)


class RunError(ScrimpError):
    """A training step that cannot be made, or that failed while running."""


class CheckpointError(ScrimpError):
    """A checkpoint that is missing, damaged, or of another model."""


def check_format(data: Mapping[str, object], name: str, version: int | tuple[int, ...], error: type[ScrimpError]) -> None:
    """Refuse a file of another kind, or of a version this scrimp does not know, by name."""
    versions = (version,) if isinstance(version, int) else version
    if data.get("format") != name or data.get("version") not in versions:
        reads = " or ".join(map(str, versions))
        raise error(f"this is {data.get('format')} version {data.get('version')}, but this scrimp reads {name} version {reads}")
