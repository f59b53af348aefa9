"""Communication requests of a step. A step is a generator that yields requests and resumes when they are served, so that one
driver can serve one step at a time, and another the same request of many tensors' steps in one call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch


class Part(NamedTuple):
    """A contiguous tensor to or from a mesh rank."""

    peer: int
    piece: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """Point to point over the group of the mesh; at most one part to and from each peer."""

    sends: list[Part]
    receives: list[Part]


@dataclass(frozen=True, kw_only=True)
class Gather:
    """`out` (members x local) receives the `local` of every member, in the order of `members`."""

    members: tuple[int, ...]
    local: torch.Tensor
    out: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class ReduceScatter:
    """`out` receives the sum of the members' `parts[k]`, k being its place in the order of `members`."""

    members: tuple[int, ...]
    parts: torch.Tensor
    out: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class AllReduce:
    """`total` becomes the sum over the members, in place."""

    members: tuple[int, ...]
    total: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class AllToAll:
    """Flat `parts` for all members one behind the other, so many elements for each; `out` receives theirs. In the order of
    `members`."""

    members: tuple[int, ...]
    parts: torch.Tensor
    sizes: list[int]
    out: torch.Tensor
    out_sizes: list[int]


Request = Exchange | Gather | ReduceScatter | AllReduce | AllToAll
