"""What the engine did for the lowered program when an error was raised: communication of weights and gradients between passes.

Nothing is written down while a step runs: the traceback has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from traceback import walk_tb

from scrimp.engine.lowered.weights import EngineWeights


def operation(error: BaseException, paths: Sequence[str]) -> str | None:
    """None if the error comes from another place. `paths`: of the layers of the store's table."""
    for frame, _ in reversed([*walk_tb(error.__traceback__)]):
        if frame.f_code is EngineWeights.complete.__code__:
            return f"after backward, sum over the ranks of the gradient of {frame.f_locals['name']}"
        if frame.f_code is EngineWeights._refresh.__code__:
            path = paths[frame.f_locals["layer"]] or "the model itself"
            return f"layer {path}, gather of weights that other ranks updated"
    return None
