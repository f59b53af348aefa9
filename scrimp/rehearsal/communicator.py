"""Stands for the ranks that a rehearsed rank would talk to: nothing is sent, and every move is noted with its predicted
seconds."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from scrimp.cluster import Cluster
from scrimp.engine import MeteredRanks
from scrimp.layout import Mesh
from scrimp.lower import Handle
from scrimp.move import LoneComm, Peers, Program, seconds_on


class StubRanks(MeteredRanks):
    """`native`: as ranks on CUDA. `seconds`: predicted, of all moves since it was set. `spent`: measured, of what this rank did
    for them, which the network would do."""

    def __init__(self, mesh: Mesh, rank: int, cluster: Cluster, *, native: bool) -> None:
        super().__init__(mesh, rank, LoneComm(mesh, rank, native=native))
        self.native = native
        self.seconds = self.spent = 0.0
        self._cluster = cluster.on(mesh)
        self.programs: dict[str, Program] = {}  # of all moves so far
        self._costs: dict[str, float] = {}

    def move(self, program: Program, local: torch.Tensor, *, donate: bool) -> torch.Tensor:
        begin = self._predict(program, local)
        found = super().move(program, local, donate=donate)
        self.spent += _now(local) - begin
        return found

    def start(self, program: Program, local: torch.Tensor, *, donate: bool) -> Handle:
        """Under way, as in every step but the first, which has compared the programs of all ranks."""
        if not program.steps:
            return super().start(program, local, donate=donate)
        begin = self._predict(program, local)
        with self.group.having_agreed(program):
            found = self.under_way(program, local, donate=donate)
        self.spent += _now(local) - begin
        return found

    def _predict(self, program: Program, local: torch.Tensor) -> float:
        """Adds the seconds of a move. Returns the time."""
        if program.hash not in self._costs:
            self.programs[program.hash] = program
            self._costs[program.hash] = seconds_on(program, self._cluster)
        self.seconds += self._costs[program.hash]
        return _now(local)

    def has_met(self, key: tuple[int, str]) -> bool:
        """The ledger of CPU ranks has what moves take when they run for the first time; that of a GPU what they take later."""
        return bool(self.native)


Parts = Sequence[tuple[int, torch.Tensor]]


class StubPeers(Peers):
    """The ranks of other pipeline stages. Messages have one link: the slowest of the cluster."""

    def __init__(self, mesh: Mesh, cluster: Cluster) -> None:
        super().__init__(mesh.size)
        self.seconds, self._link = 0.0, cluster.default

    def send(self, parts: Parts, stage: int, tag: int) -> Any:
        return _Arrived()

    def receive(self, parts: Parts, stage: int, tag: int) -> Any:
        for _, tensor in parts:
            self.seconds += self._link.latency_seconds + tensor.nbytes / self._link.bytes_per_second
            tensor.zero_()
        return _Arrived()

    def spread(self, tensor: torch.Tensor, stage: int) -> None:
        self.seconds += self._link.latency_seconds + tensor.nbytes / self._link.bytes_per_second


class _Arrived:
    def wait(self) -> None: ...


def _now(tensor: torch.Tensor) -> float:
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
    return time.perf_counter()
