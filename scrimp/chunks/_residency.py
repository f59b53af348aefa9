"""Which layers to hold at each moment: farthest next use goes first (Belady), under a budget that changes over time.

A trace is the cyclic sequence of moments of a step: at each, some layers are needed together, and `room` bytes are left
for weights beside everything else. Between moments a layer that is held costs nothing; a layer that must come costs its
bytes up. A layer that is dropped costs nothing if the host has its content already (it does, before its gradient).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from scrimp.errors import FitError


@dataclass(frozen=True, kw_only=True)
class Moment:
    """`needs`: layers that must be there; `ends`: layers whose weights are gone after it (their gradient has landed)."""

    needs: tuple[int, ...]
    room_nbytes: int
    ends: tuple[int, ...] = ()
    label: str = ""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """`drops[i]`: layers to let go of before moment i; `fetches[i]`: layers to bring for it; bytes brought in a step."""

    drops: tuple[tuple[int, ...], ...]
    fetches: tuple[tuple[int, ...], ...]
    fetched_nbytes: int


def schedule(moments: Sequence[Moment], nbytes: Sequence[int]) -> Schedule:
    """Simulate two steps and keep the second: what is held at the end of one is held at the start of the next."""
    uses: dict[int, list[int]] = {}
    for index, moment in enumerate(moments):
        for layer in moment.needs:
            uses.setdefault(layer, []).append(index)
    total = len(moments)

    def next_use(layer: int, now: int) -> int:
        later = [use for use in uses[layer] if use > now]
        return later[0] if later else uses[layer][0] + total

    held: set[int] = set()
    drops: list[tuple[int, ...]] = []
    fetches: list[tuple[int, ...]] = []
    for _ in range(2):
        drops, fetches = [], []
        for index, moment in enumerate(moments):
            needed = {*moment.needs}
            room = moment.room_nbytes - sum(nbytes[layer] for layer in needed)
            if room < 0:
                raise FitError(
                    f"{moment.label or f'moment {index}'} needs {sum(nbytes[layer] for layer in needed)} bytes of weights, "
                    f"but {moment.room_nbytes} are left beside activations and buffers"
                )
            dropped = []
            others = sorted(held - needed, key=lambda layer: (-next_use(layer, index), layer))
            extra = sum(nbytes[layer] for layer in others)
            while extra > room:
                layer = others.pop(0)
                dropped.append(layer)
                extra -= nbytes[layer]
            fetches.append(tuple(layer for layer in moment.needs if layer not in held))
            drops.append(tuple(dropped))
            held = ({*others} | needed) - {*moment.ends}
    return Schedule(
        drops=tuple(drops),
        fetches=tuple(fetches),
        fetched_nbytes=sum(nbytes[layer] for fetched in fetches for layer in fetched),
    )
