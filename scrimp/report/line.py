"""The line of a step: of the progress of a run, and of `scrimp top`, which reads it from the metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from scrimp.ledger import format_nbytes


@dataclass(frozen=True, kw_only=True)
class StepLine:
    """What a line shows; None where it is unknown. `done`: steps so far. `device_nbytes`: (now or None, peak, budget or None).
    `mfu`: share of the devices' rate that the model's FLOPs reach. `more`: other figures by name, such as a validation loss."""

    done: int
    steps: int | None
    loss: float | None
    skipped: int
    tokens_per_second: float | None
    mfu: float | None
    seconds_left: float | None
    device_nbytes: tuple[int | None, int, int | None]
    host_nbytes: int
    up_nbytes: int
    down_nbytes: int
    received_nbytes: int | None = None
    more: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        """The most important part first, because a narrow terminal may wrap the line."""
        loss = "not finite" if self.loss is None else f"{self.loss:.4f}"
        parts = [f"step {self.done}" if self.steps is None else f"step {self.done}/{self.steps}", f"loss {loss}"]
        parts += [f"{name.replace('_', ' ')} {value:.4f}" for name, value in self.more.items()]
        if self.skipped:
            parts.append(f"{self.skipped} skipped")
        if self.tokens_per_second:
            parts.append(f"{self.tokens_per_second:,.0f} tokens/s")
        if self.mfu is not None:
            parts.append(f"mfu {self.mfu:.1%}")
        if self.seconds_left is not None:
            parts.append(f"eta {timedelta(seconds=round(self.seconds_left))}")
        now, peak, budget = self.device_nbytes
        at = "" if now is None else f" {format_nbytes(now)},"
        of = "" if budget is None else f" of {format_nbytes(budget)}"
        parts.append(f"device{at} peak {format_nbytes(peak)}{of}")
        parts.append(f"host {format_nbytes(self.host_nbytes)}")
        parts.append(f"up {format_nbytes(self.up_nbytes)}, down {format_nbytes(self.down_nbytes)} a step")
        if self.received_nbytes is not None:
            parts.append(f"received {format_nbytes(self.received_nbytes)}")
        return "  ".join(parts)


def line_of(rows: Sequence[Mapping[str, Any]], steps: int | None, budget_nbytes: int | None, window: int = 20) -> StepLine:
    """Of the last rows of a metrics file; speeds are averages over `window` steps."""
    last, recent = rows[-1], rows[-window:]
    seconds = sum(row.get("seconds") or 0.0 for row in recent) / len(recent)
    rates = [row["tokens_per_second"] for row in recent if row.get("tokens_per_second")]
    validated = next((row["validation_loss"] for row in reversed(rows) if row.get("validation_loss") is not None), None)
    done = last["step"] + 1
    return StepLine(
        done=done,
        steps=steps,
        loss=last.get("loss"),
        skipped=last.get("skipped", 0),
        tokens_per_second=len(rates) / sum(1 / rate for rate in rates) if rates else None,
        mfu=last.get("mfu"),
        seconds_left=None if steps is None else max(steps - done, 0) * seconds,
        device_nbytes=(None, last.get("device_peak_nbytes", 0), budget_nbytes),
        host_nbytes=last.get("host_nbytes", 0),
        up_nbytes=last.get("up_nbytes", 0),
        down_nbytes=last.get("down_nbytes", 0),
        received_nbytes=last.get("received_nbytes"),
        more={} if validated is None else {"validation_loss": validated},
    )
