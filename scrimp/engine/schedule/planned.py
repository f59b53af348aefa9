"""What the engine has decided for batches of one shape."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from scrimp.chunks import Choice, LayerCost, ScheduleStep

if TYPE_CHECKING:
    from scrimp.engine.schedule.metering_policy import Seen


@dataclass
class Planned:
    """The plan for one batch shape. `kept` is None until the first trace."""

    kept: frozenset[int] | None = None
    offloaded: bool = False
    choice: Choice | None = None
    expected: tuple[tuple[int, ...], ...] = ()
    trace: tuple[ScheduleStep, ...] = ()
    costs: tuple[LayerCost, ...] = ()
    again: frozenset[int] = frozenset()
    replans: int = 0
    seen: Seen | None = None
    looked: bool | None = None  # replanned with measured times; the value is `Planning.checked` at that time
