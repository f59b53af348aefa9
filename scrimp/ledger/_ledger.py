"""The ledger: every byte on a tier belongs to one kind. Predicted and measured ledgers are the same class.

`peak` is the snapshot with the largest total; `peak_nbytes` is the number that must fit. `live_peak` is the same without the
workspace that kernels allocate and free inside one operator: a plan predicts that number.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from scrimp.errors import ScrimpError, check_format
from scrimp.ledger._sizes import format_nbytes
from scrimp.ledger._timeline import Recording

FORMAT, VERSION = "scrimp.ledger", 1

WORKSPACE = "workspace"
KINDS = (
    "parameters", "gradients", "optimizer", "residual", "activations", "moved", "scratch", "temporaries", "workspace", "buffers",
    "padding", "snapshot",
)  # fmt: skip
_CHANGING = threading.RLock()  # a save in the background charges the host's ledger from its own thread


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """Bytes by kind at one point in time."""

    by_kind: tuple[tuple[str, int], ...]
    when: str

    @cached_property
    def nbytes(self) -> int:
        return sum(nbytes for _, nbytes in self.by_kind)

    def __str__(self) -> str:
        parts = ", ".join(f"{kind} {format_nbytes(nbytes)}" for kind, nbytes in self.by_kind if nbytes)
        return f"{format_nbytes(self.nbytes)} {self.when}: {parts or 'nothing'}"


@dataclass(kw_only=True)
class Ledger:
    """The bytes on one tier, by kind. Only `charge`, `free` and `move` change it."""

    tier: str
    now: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    total_nbytes: int = 0
    peak: Snapshot = field(default_factory=lambda: Snapshot(by_kind=(), when="at the start"))
    live_peak: Snapshot = field(default_factory=lambda: Snapshot(by_kind=(), when="at the start"))
    when: str = "at the start"
    recording: Recording | None = field(default=None, repr=False, compare=False)  # of the step that runs, if it is recorded

    @property
    def peak_nbytes(self) -> int:
        return self.peak.nbytes

    def charge(self, kind: str, nbytes: int) -> None:
        with _CHANGING:
            self.now[kind] += nbytes
            self.total_nbytes += nbytes
            if self.total_nbytes > self.peak.nbytes:
                self.peak = self.snapshot()
            if kind != WORKSPACE and self.total_nbytes - self.now[WORKSPACE] > self.live_peak.nbytes:
                self.live_peak = self._live()
            if self.recording is not None:
                self.recording.saw(self)

    def free(self, kind: str, nbytes: int) -> None:
        with _CHANGING:
            self.now[kind] -= nbytes
            self.total_nbytes -= nbytes
        if self.now[kind] < 0:
            raise ScrimpError(f"the {self.tier} ledger holds {self.now[kind]} bytes of {kind}: more was freed than charged")

    def move(self, nbytes: int, *, source: str, target: str) -> None:
        """Change the kind of bytes in place: a weight's buffer that its gradient overwrites."""
        with _CHANGING:
            self.now[source] -= nbytes
            self.now[target] += nbytes

    def snapshot(self) -> Snapshot:
        return Snapshot(by_kind=tuple(self.now.items()), when=self.when)

    def _live(self) -> Snapshot:
        return Snapshot(by_kind=tuple((kind, size) for kind, size in self.now.items() if kind != WORKSPACE), when=self.when)

    def reset_peak(self) -> None:
        self.peak, self.live_peak = self.snapshot(), self._live()

    def to_json(self) -> str:
        data = {"format": FORMAT, "version": VERSION, "tier": self.tier, "now": self.now}
        peaks = {"peak": self.peak, "live_peak": self.live_peak}
        return json.dumps({**data, **{name: {"when": at.when, "by_kind": dict(at.by_kind)} for name, at in peaks.items()}})

    @classmethod
    def from_json(cls, text: str) -> Ledger:
        data = json.loads(text)
        check_format(data, FORMAT, VERSION, ScrimpError)
        now: Mapping[str, int] = data["now"]
        peak, live = (
            Snapshot(by_kind=tuple(at["by_kind"].items()), when=at["when"])
            for at in (data["peak"], data.get("live_peak") or data["peak"])
        )
        return cls(tier=data["tier"], now=dict(now), total_nbytes=sum(now.values()), peak=peak, live_peak=live)


@dataclass(kw_only=True)
class Books:
    """The ledgers of one rank's tiers. Attributes of `Books` itself are those of the device's ledger, whose peak is the number
    that must fit."""

    device: Ledger
    host: Ledger = field(default_factory=lambda: Ledger(tier="host"))
    disk: Ledger = field(default_factory=lambda: Ledger(tier="disk"))

    @property
    def peak(self) -> Snapshot:
        return self.device.peak

    @property
    def peak_nbytes(self) -> int:
        return self.device.peak_nbytes

    @property
    def now(self) -> dict[str, int]:
        return self.device.now

    @property
    def total_nbytes(self) -> int:
        return self.device.total_nbytes

    def reset_peak(self) -> None:
        self.device.reset_peak()

    def snapshot(self) -> Snapshot:
        return self.device.snapshot()

    def __str__(self) -> str:
        rows = []
        for ledger in (self.device, self.host, self.disk):
            if ledger.peak_nbytes:
                rows += [f"{ledger.tier} now   {ledger.snapshot()}", f"{ledger.tier} peak  {ledger.peak}"]
        return "\n".join(rows)
