"""Stands for the ranks that a rehearsed rank would talk to: nothing is sent, and the clock hears of every move and of its
predicted seconds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from scrimp.cluster import Cluster
from scrimp.engine import MeteredRanks
from scrimp.layout import Mesh
from scrimp.lower import Handle
from scrimp.move import LoneComm, Peers, Program, seconds_on
from scrimp.rehearsal.clock import Clock

Parts = Sequence[tuple[int, torch.Tensor]]


class StubRanks(MeteredRanks):
    """`native`: as ranks on CUDA. `programs`: of all moves so far, by hash."""

    def __init__(self, mesh: Mesh, rank: int, cluster: Cluster, clock: Clock, *, native: bool) -> None:
        super().__init__(mesh, rank, LoneComm(mesh, rank, native=native))
        self.native = native
        self.programs: dict[str, Program] = {}
        self._cluster, self._clock = cluster.on(mesh), clock
        self._costs: dict[str, float] = {}

    def move(self, program: Program, local: torch.Tensor, *, donate: bool) -> torch.Tensor:
        self._clock.enter()
        found = super().move(program, local, donate=donate)
        self._clock.moved(self._seconds(program))
        return found

    def start(self, program: Program, local: torch.Tensor, *, donate: bool) -> Handle:
        """Under way, as in every step but the first, which has compared the programs of all ranks."""
        if not program.steps:
            return super().start(program, local, donate=donate)
        self._clock.enter()
        with self.group.having_agreed(program):
            found = self.under_way(program, local, donate=donate)
        return OnItsWay(found.wait, self._clock, self._seconds(program))

    def _seconds(self, program: Program) -> float:
        if program.hash not in self._costs:
            self.programs[program.hash] = program
            self._costs[program.hash] = seconds_on(program, self._cluster)
        return self._costs[program.hash]

    def has_met(self, key: tuple[int, str]) -> bool:
        """The ledger of CPU ranks has what moves take when they run for the first time; that of a GPU what they take later."""
        return bool(self.native)


class OnItsWay:
    """A move, or a message, that has started and is waited for later."""

    def __init__(self, finish: Callable[[], Any], clock: Clock, seconds: float) -> None:
        self._finish, self._clock, self._number = finish, clock, clock.started(seconds)

    def wait(self) -> Any:
        self._clock.enter()
        made = self._finish()
        self._clock.waited(self._number)
        return made


class StubPeers(Peers):
    """The ranks of other pipeline stages. Messages have one link: the slowest of the cluster."""

    def __init__(self, mesh: Mesh, cluster: Cluster, clock: Clock) -> None:
        super().__init__(mesh.size)
        self._link, self._clock = cluster.default, clock

    def send(self, parts: Parts, stage: int, tag: int) -> Any:
        return _Arrived()

    def receive(self, parts: Parts, stage: int, tag: int) -> Any:
        self._clock.enter()
        for _, tensor in parts:
            tensor.zero_()
        return OnItsWay(lambda: None, self._clock, sum(self._seconds(tensor) for _, tensor in parts))

    def spread(self, tensor: torch.Tensor, stage: int) -> None:
        self._clock.enter()
        self._clock.moved(self._seconds(tensor))

    def _seconds(self, tensor: torch.Tensor) -> float:
        return self._link.latency_seconds + tensor.nbytes / self._link.bytes_per_second


class _Arrived:
    def wait(self) -> None: ...
