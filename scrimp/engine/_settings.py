"""What an engine may be asked for."""

from __future__ import annotations

from scrimp.errors import RunError


def validate(precision: str, accumulate: int, recompute: str, clip_norm: float | None) -> None:
    if precision not in ("bf16", "fp16", "fp32"):
        raise RunError(f"precision {precision!r} is not one of 'bf16', 'fp16', 'fp32'")
    if isinstance(accumulate, bool) or not isinstance(accumulate, int) or accumulate < 1:
        raise RunError(f"accumulate={accumulate!r}: it is the number of parts a batch is split into, 1 or more")
    if recompute not in ("auto", "none", "all"):
        raise RunError(f"recompute={recompute!r} is not one of 'auto', 'none', 'all'")
    if clip_norm is not None and not clip_norm > 0:
        raise RunError(f"clip_norm={clip_norm!r} must be more than 0")
