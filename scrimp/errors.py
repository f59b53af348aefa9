"""The one family of errors. A message says what, where, the numbers on both sides, and what to try."""

from __future__ import annotations

from collections.abc import Mapping


class ScrimpError(Exception):
    """Base of every error scrimp raises on purpose.

    >>> import scrimp
    >>> try:
    ...     scrimp.Cluster.preset("8xAbacus")
    ... except scrimp.ScrimpError as error:
    ...     print(type(error).__name__)
    ScrimpError
    """


class LayoutError(ScrimpError):
    """A mesh, a layout or a shape that does not make sense, alone or together.

    >>> import scrimp
    >>> try:
    ...     scrimp.Layout.parse("[x,x]")
    ... except scrimp.LayoutError:
    ...     print("axis x is used twice")
    axis x is used twice
    """


class MoveError(ScrimpError):
    """A move between layouts that cannot be made, or that failed while running.

    >>> import scrimp
    >>> try:
    ...     scrimp.synthesize((8,), scrimp.Mesh({"x": 2}), "[-]", "[-]+x")
    ... except scrimp.MoveError:
    ...     print("a move cannot make a partial sum")
    a move cannot make a partial sum
    """


class CaptureError(ScrimpError):
    """A model whose training cannot be told as one graph, or a batch that does not belong to it.

    >>> import scrimp, torch
    >>> try:
    ...     scrimp.plan(torch.nn.Linear(2, 2), (torch.ones(4, 2),), "2xCPU")
    ... except scrimp.CaptureError:
    ...     print("the model returns no loss")
    the model returns no loss
    """


class PlanError(ScrimpError):
    """A request to the planner that does not make sense, or that has no solution.

    >>> import scrimp
    >>> try:
    ...     scrimp.Plan.from_json("{}")
    ... except scrimp.PlanError:
    ...     print("this is no plan")
    this is no plan
    """


class PlanWarning(UserWarning):
    """A plan that could be better: an operator that every device runs whole.

    >>> import scrimp, warnings
    >>> with warnings.catch_warnings():
    ...     warnings.simplefilter("ignore", scrimp.PlanWarning)  # around scrimp.plan(...)
    """


class FitError(ScrimpError):
    """It does not fit: how many bytes, where, when, and what would help. `least_nbytes`: the least budget that works, where it
    is known. `tier`: of "device", "host" and "disk" the one whose budget that is.

    >>> import scrimp
    >>> from scrimp import zoo
    >>> try:
    ...     scrimp.Engine(zoo.build("gpt-tiny"), memory="1KiB", device="cpu")
    ... except scrimp.FitError as error:
    ...     print(error.tier, error.least_nbytes > 1024)
    device True
    """

    def __init__(self, *args: object, least_nbytes: int | None = None, tier: str | None = None) -> None:
        super().__init__(*args)
        self.least_nbytes = least_nbytes
        self.tier = tier

    def bare(self) -> FitError:
        """The same error without its traceback and its cause, whose frames hold the tensors that did not fit."""
        return FitError(*self.args, least_nbytes=self.least_nbytes, tier=self.tier)


class RunError(ScrimpError):
    """A training step that cannot be made, or that failed while running.

    >>> import scrimp
    >>> try:
    ...     scrimp.Sparse(density=2)
    ... except scrimp.RunError:
    ...     print("density is a share, at most 1")
    density is a share, at most 1
    """


class CheckpointError(ScrimpError):
    """A checkpoint that is missing, damaged, or of another model.

    >>> import scrimp
    >>> from scrimp import zoo
    >>> with scrimp.Engine(zoo.build("gpt-tiny"), memory="1GiB", device="cpu") as engine:
    ...     try:
    ...         engine.load("no-such-folder")
    ...     except scrimp.CheckpointError:
    ...         print("there is no checkpoint")
    there is no checkpoint
    """


def check_format(data: Mapping[str, object], name: str, version: int | tuple[int, ...], error: type[ScrimpError]) -> None:
    """Refuse a file of another kind, or of a version this scrimp does not know, by name."""
    versions = (version,) if isinstance(version, int) else version
    if data.get("format") != name or data.get("version") not in versions:
        reads = " or ".join(map(str, versions))
        raise error(f"this is {data.get('format')} version {data.get('version')}, but this scrimp reads {name} version {reads}")
