"""The one family of errors. A message says what, where, the numbers on both sides, and what to try."""


class ScrimpError(Exception):
    """Base of every error scrimp raises on purpose."""


class LayoutError(ScrimpError):
    """A mesh, a layout or a shape that does not make sense, alone or together."""


class MoveError(ScrimpError):
    """A move between layouts that cannot be made, or that failed while running."""


class FitError(ScrimpError):
    """It does not fit: how many bytes, where, when, and what would help."""


class RunError(ScrimpError):
    """A training step that cannot be made, or that failed while running."""


class CheckpointError(ScrimpError):
    """A checkpoint that is missing, damaged, or of another model."""
