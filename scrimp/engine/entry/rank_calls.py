"""Ranks that make different calls (one steps, one saves) stop with a message that names both calls.

Every public call that communicates has a number on each rank. A rank writes the number and the name of its call into the process
group's key-value store, which waits for nobody. Then:

- `step` and `backward` go on at once. Where ranks compare the shapes of their batches anyway, number and name travel along.
  If communication fails, the store says which call every other rank was in.
- Every other call waits until all ranks have made the same call. Rank 0 reads the records of all others, and they read rank 0's.

A rank that waits starts no collective, so it cannot disturb a rank that steps.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from scrimp.chunks import Wire
from scrimp.engine.setup.process_groups import TrainingGroup, world_timeout
from scrimp.errors import MoveError, RunError, ScrimpError
from scrimp.move import default_store

if TYPE_CHECKING:
    from scrimp.engine._training import Training

NAMES = (
    "step", "backward", "update", "evaluate", "state_dict", "iter_state", "save", "load", "full_parameters", "close", "dtensors",
    "resize", "zero_grad",
)  # fmt: skip
AT_ONCE = {"step", "backward"}  # these do not wait for the other ranks here
WITH_GRADIENTS = {"backward", "update", "load", "close", "zero_grad"}  # these may come between backward and update
KEPT = 8  # calls that a rank's record has: other ranks may be that many calls behind
TIMEOUT = timedelta(minutes=30)  # torch's own, where the group's cannot be read
FIRST_SLEEP, LONGEST_SLEEP = 2e-4, 2e-2
REPORTS = 2.0  # seconds in which the other ranks may say where they failed
ADVICE = "every rank must make the same calls in the same order"


@dataclass(frozen=True, kw_only=True)
class Record:
    """What one rank publishes: its last calls by number; from rank 0 also the last call that all ranks agreed on, and why they
    did not agree."""

    calls: dict[int, str] = field(default_factory=dict)
    agreed: int = 0
    stopped: tuple[int, str] = (0, "")

    @property
    def last(self) -> int:
        return max(self.calls, default=0)

    def to_json(self) -> str:
        return json.dumps({"calls": [*self.calls.items()], "agreed": self.agreed, "stopped": self.stopped})

    @classmethod
    def from_json(cls, text: str | bytes) -> Record:
        data = json.loads(text)
        number, why = data["stopped"]
        return cls(calls={int(n): name for n, name in data["calls"]}, agreed=data["agreed"], stopped=(number, why))


class Calls:
    """Numbers and publishes this rank's calls, and compares them with those of the other ranks."""

    def __init__(self, wire: Wire, check: Callable[[], None] = lambda: None) -> None:
        """`check()` is called where waiting may be interrupted."""
        self.check = check
        self.wire, self.number, self.name = wire, 0, ""
        self._recent: deque[tuple[int, str]] = deque(maxlen=KEPT)
        self._agreed, self._stopped = 0, (0, "")
        self._there: set[int] = set()  # ranks that have a record
        if wire.world > 1:
            self._store: Any = default_store()
            self._timeout = world_timeout(wire) or TIMEOUT
            drawn = int.from_bytes(torch.randint(256, (7,), generator=_own(), dtype=torch.uint8).numpy().tobytes(), "big")
            self._key = f"scrimp/calls/{int(wire.from_first(torch.tensor([drawn])))}"  # of this engine alone

    @property
    def row(self) -> list[int]:
        """Number and name of this call, to travel with another message."""
        return [self.number, NAMES.index(self.name)] if self.name else [0, 0]

    def begin(self, name: str) -> None:
        self.number, self.name = self.number + 1, name
        if self.wire.world == 1:
            return
        self._recent.append((self.number, name))
        self._tell()
        if name not in AT_ONCE:
            self._agree()

    def differ(self, *, lagging: bool) -> str | None:
        """Which other ranks made another call than this one under its number; `lagging`: or have not made it yet."""
        for rank in range(self.wire.world):
            other = self._read(rank) if rank != self.wire.rank else None
            if other is None:
                continue
            name = other.calls.get(self.number)
            if name is not None and name != self.name:
                return self._both(rank, name)
            if lagging and other.last < self.number:
                return self._behind(rank, other)
        return None

    def reports(self, where: str) -> str:
        """Tells the other ranks where this one failed, and says where they did, and which of them say nothing."""
        if self.wire.world == 1:
            return ""
        keys = {rank: f"{self._key}/failed/{self.number}/{rank}" for rank in range(self.wire.world)}
        mine, deadline, found = self.wire.rank, time.monotonic() + REPORTS, dict[int, str]()
        try:
            self._store.set(keys[mine], where)
            while len(found) < self.wire.world - 1 and time.monotonic() < deadline:
                for rank in keys.keys() - found.keys() - {mine}:
                    if self._store.check([keys[rank]]):
                        found[rank] = self._store.get(keys[rank]).decode()
                time.sleep(LONGEST_SLEEP)
        except RuntimeError:  # the store is gone as well
            return ""
        silent = sorted(keys.keys() - found.keys() - {mine})
        text = "".join(f"; rank {rank} failed in {there}" for rank, there in sorted(found.items()) if there != where)
        return text + (f"; of rank {', '.join(map(str, silent))} there is no report" if silent else "")

    def _tell(self) -> None:
        record = Record(calls=dict(self._recent), agreed=self._agreed, stopped=self._stopped)
        self._store.set(f"{self._key}/{self.wire.rank}", record.to_json())

    def _read(self, rank: int) -> Record:
        key = f"{self._key}/{rank}"
        if rank not in self._there and not self._store.check([key]):
            return Record()
        self._there.add(rank)
        return Record.from_json(self._store.get(key))

    def _agree(self) -> None:
        deadline = time.monotonic() + self._timeout.total_seconds()
        if self.wire.rank != 0:
            self._await(0, deadline, lambda record: max(record.agreed, record.stopped[0]) >= self.number)
            return
        try:
            for rank in range(1, self.wire.world):
                self._await(rank, deadline, lambda record: True)
        except RunError as error:
            self._stopped = (self.number, str(error))
            self._tell()
            raise
        self._agreed = self.number
        self._tell()

    def _await(self, rank: int, deadline: float, done: Any) -> None:
        """Until a rank has made this call, and its record is as it must be; raise if it made another one."""
        sleep = FIRST_SLEEP
        while True:
            record = self._read(rank)
            name = record.calls.get(self.number)
            if name is not None and name != self.name:
                raise RunError(self._both(rank, name))
            if record.stopped[0] == self.number:
                raise RunError(record.stopped[1])
            if record.last >= self.number and done(record):
                return
            if time.monotonic() > deadline:
                raise RunError(f"{self._behind(rank, record)} (waited {self._timeout.total_seconds():g} s)")
            self.check()
            time.sleep(sleep)
            sleep = min(1.5 * sleep, LONGEST_SLEEP)

    def _both(self, rank: int, name: str) -> str:
        rows = sorted([(self.wire.rank, self.name), (rank, name)])
        calls = " and ".join(f"rank {at} calls engine.{call}" for at, call in rows)
        return f"the ranks' calls differ: as call {self.number} {calls}; {ADVICE}"

    def _behind(self, rank: int, record: Record) -> str:
        last = f"its last was call {record.last}, engine.{record.calls[record.last]}" if record.calls else "it has made none"
        mine = f"rank {self.wire.rank} calls engine.{self.name} as call {self.number}"
        return f"{mine}, which rank {rank} has not made: {last}; {ADVICE}"


def meeting(group: TrainingGroup, calls: Calls) -> Calls:
    """The calls of all ranks of the default group, which meet in `resize`; `calls`: of the training group."""
    return calls if group.wire is group.everyone else Calls(group.everyone, calls.check)


def _own() -> torch.Generator:
    """A generator of its own, so that the user's random state is untouched."""
    generator = torch.Generator()
    generator.seed()
    return generator


def begin_call(engine: Training, name: str) -> None:
    """Registers the start of a public call that all ranks make together."""
    group = engine.group
    if group.outside:
        raise RunError(
            f"rank {group.everyone.rank} calls engine.{name}, and {group}: this rank does not train and holds nothing; "
            "engine.resize(group), which all ranks call, brings it in"
        )
    if engine.residents.active:
        inside = engine.calls.name
        raise RunError(f"engine.{name} was called inside engine.{inside}: by the model, its hooks, or the function that it runs")
    if engine.pending and name not in WITH_GRADIENTS:
        raise RunError(
            f"engine.{name} with the gradients of {engine.pending} engine.backward calls pending: call engine.update() first"
        )
    engine.calls.begin(name)
    engine.saves.check(engine.calls.number)


@contextmanager
def naming_calls(engine: Training) -> Iterator[None]:
    """Wraps communication: if it fails while another rank is in another call, the error names both calls."""
    try:
        yield
    except (ScrimpError, RuntimeError) as error:
        if engine.wire.world == 1:
            raise
        try:
            why = engine.calls.differ(lagging=_is_of_a_move(error))
        except Exception:  # the store is gone as well
            why = None
        if why is None or why in str(error):
            raise
        raise RunError(f"{why}. Here it failed with: {error}") from error


def _is_of_a_move(error: BaseException | None) -> bool:
    """Whether the error comes from failed communication."""
    while error is not None and not isinstance(error, MoveError):
        error = error.__cause__
    return error is not None


def same_calls(rows: torch.Tensor) -> None:
    """Compares the `Calls.row` of every rank, after they were exchanged; raises if they differ."""
    if bool((rows == rows[0]).all()):
        return
    rank = int((rows != rows[0]).any(1).nonzero()[0, 0])
    told = [f"rank {at} calls engine.{NAMES[int(rows[at, 1])]} (its call {int(rows[at, 0])})" for at in (0, rank)]
    raise RunError(f"the ranks' calls differ: {' and '.join(told)}; {ADVICE}")


def same_settings(digests: torch.Tensor) -> None:
    """Compares a digest of every rank's optimizer settings in this step; raises if they differ."""
    if not bool((digests == digests[0]).all()):
        rank = int((digests != digests[0]).nonzero()[0, 0])
        raise RunError(
            f"rank {rank} has another learning rate than rank 0, or other settings of the optimizer: set the same on all ranks; "
            "a scheduler that follows the loss needs the loss of all ranks"
        )
